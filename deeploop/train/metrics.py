"""Measure a training step: losses, gradient norm, the residual stream, the experts' loads."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.config.backprop import Segment
from deeploop.model.looplm import LoopLM
from deeploop.model.moe.layer import MoE
from deeploop.model.state import OnVisit, Visit
from deeploop.train.backprop import SegmentResult
from deeploop.utils.distributed import Ranks


def rms(h: Tensor) -> Tensor:
    """Return the root mean square of all values of h, float32, without gradient."""
    return h.detach().float().square().mean().sqrt()


def record_loop_rms(values: list[Tensor]) -> OnVisit:
    """Make an `on_visit` that appends the stream's RMS at each loop's end."""

    def on_visit(visit: Visit, h: Tensor) -> None:
        if visit.ends_loop:
            values.append(rms(h))

    return on_visit


@torch.no_grad()
def largest_rms(model: LoopLM, tokens: Tensor) -> str:
    """Name the visit with the largest RMS of the stream; NaN counts as larger than any number."""
    seen: list[tuple[float, Visit]] = []
    model(tokens, on_visit=lambda visit, h: seen.append((rms(h).item(), visit)))
    value, visit = max(seen, key=lambda s: float("inf") if s[0] != s[0] else s[0])
    kind = type(visit.sublayer.branch).__name__
    if visit.loop is None:
        return f"block {visit.block + 1}, outside the loops ({kind}), RMS {value:.3g}"
    return f"loop {visit.loop + 1}, sublayer {visit.sublayer_index + 1} ({kind}), RMS {value:.3g}"


class StepMetrics:
    """Figures of one step, on the device until they are read.

    Attributes:
        losses: by segment, its mean cross-entropy after its last loop, nats per token.
        shares: further means over the batch's tokens, of the last segment.
        grad_norm: of the last optimizer step, before clipping.
        loads: int64 [loops, n_layers, experts], tokens sent to each expert, with the loops of this
            step; None without experts.
        dropped: int64 [n_layers, experts], those over an expert's capacity, over all loops; None
            without a capacity.
        nonfinite: bool scalar; a loss, a gradient or an expert's bias was not finite.
    """

    def __init__(self, model: LoopLM, observe: bool = False):
        self.config, self.observe = model.config, observe
        self.losses: dict[Segment, Tensor] = {}
        self.shares: dict[str, Tensor] = {}
        self.z: Tensor | None = None
        self.z_visits: dict[Segment, int] = {}  # with gradient
        self.loads: Tensor | None = None
        self.dropped: Tensor | None = None
        self.rms: list[Tensor] = []
        self.observed: set[Segment] = set()
        self.grad_norm = torch.zeros(())
        moes = [s.branch for s in model.sublayers if isinstance(s.branch, MoE)]
        self.moe = moes[0] if moes else None
        device = model.embed_tokens.weight.device
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=device)

    def on_visit(self, segment: Segment) -> OnVisit | None:
        """Return an `on_visit` for the first micro-batch of each segment; None if not observing."""
        if not self.observe or segment in self.observed:
            return None
        self.observed.add(segment)
        if segment.from_start:
            self.rms.clear()
        return record_loop_rms(self.rms)

    def check(self, values: Tensor) -> None:
        """Note whether any of the values is not finite, without waiting for the device."""
        self.nonfinite |= ~torch.isfinite(values).all()

    def add(self, segment: Segment, result: SegmentResult) -> None:
        """Add a segment's figures of one micro-batch."""
        end, c = segment.loops.stop, self.config
        first = segment not in self.losses
        self.losses[segment] = result.loss + (0 if first else self.losses[segment])
        if first:
            self.shares = result.figures
        else:
            self.shares = {k: v + result.figures[k] for k, v in self.shares.items()}
        if result.z is not None:
            self.z = result.z if self.z is None else self.z + result.z
            self.z_visits[segment] = len(segment.loops) * c.n_layers
        if result.expert_loads and self.moe is not None:
            loads = torch.stack(result.expert_loads).view(-1, c.n_layers, c.moe.experts)
            self.loads = padded(self.loads, end, like=loads)
            self.loads[end - len(loads) : end] += loads
            over = self.moe.over_capacity(loads)
            if over is not None:
                self.dropped = over.sum(0) + (0 if self.dropped is None else self.dropped)

    def gather(self, ranks: Ranks) -> None:
        """Sum over the ranks the figures that each has of its share of the batch."""
        z = [] if self.z is None else [self.z]
        counts = [x for x in (self.loads, self.dropped) if x is not None]
        ranks.all_reduce_([*self.losses.values(), *self.shares.values(), *z, *counts])

    def total_loss(self) -> Tensor:
        """Return the sum of the segments' losses."""
        return torch.stack(list(self.losses.values())).sum()

    def figures(self) -> dict[str, Any]:
        """Return the logged figures; waits for the device.

        loss is the last segment's, in nats per token: with a step per segment the optimizer
        has then already stepped on this batch, so compare backprop plans by held-out loss.
        z is the mean over visits of the z-loss term, without its weight.
        """
        losses = [loss.item() for loss in self.losses.values()]
        figures: dict[str, Any] = {
            "loss": losses[-1],
            "grad_norm": self.grad_norm.item(),
            "residual_rms": torch.stack(self.rms).tolist(),
            "loops": max(segment.loops.stop for segment in self.losses),
            **{name: value.tolist() for name, value in self.shares.items()},
        }
        if len(losses) > 1:
            figures["segment_losses"] = losses
        if self.z is not None:
            figures["z"] = self.z.item() / sum(self.z_visits.values())
        if self.loads is not None:
            figures["router_overlap"] = router_overlap(self.loads).tolist()
            figures["load_spread"] = load_spread(self.loads).tolist()
        if self.loads is not None and self.dropped is not None:
            figures["dropped"] = (self.dropped.sum() / self.loads.sum()).item()
        return figures


def padded(loads: Tensor | None, loops: int, like: Tensor) -> Tensor:
    """Return loads with rows of zeros added up to `loops` loops: [>= loops, n_layers, experts]."""
    if loads is None:
        return like.new_zeros(loops, *like.shape[1:])
    return F.pad(loads, (0, 0, 0, 0, 0, max(0, loops - len(loads))))


def router_overlap(loads: Tensor) -> Tensor:
    """Return the cosine between loops of the experts' loads, mean over layers: [loops, loops].

    loads: int64 [loops, n_layers, experts]. 1 where two loops send tokens to the same
    experts (LOOM's Fig. 4: .88-1.00 with a shared router).
    """
    unit = F.normalize(loads.double(), dim=-1)
    return torch.einsum("sme,tme->st", unit, unit) / loads.shape[1]


def load_spread(loads: Tensor) -> Tensor:
    """Return the standard deviation of the experts' loads over their mean, by loop: [loops].

    loads: int64 [loops, n_layers, experts]; mean over layers. 0 is even,
    sqrt(experts / top_k - 1) is every token to the same top_k experts.
    """
    x = loads.double()
    return (x.std(-1, correction=0) / x.mean(-1).clamp_min(1)).mean(-1)
