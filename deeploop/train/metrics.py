"""What a run reports of itself: its speed, its residual stream, the loads of its experts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.config.backprop import Segment
from deeploop.model.looplm import LoopLM
from deeploop.model.moe.layer import MoE
from deeploop.model.recompute import Watch
from deeploop.model.visits import Visit
from deeploop.train.backprop import Piece
from deeploop.utils.distributed import Ranks


def rms(h: Tensor) -> Tensor:
    return h.detach().float().square().mean().sqrt()


def watch_loops(seen: list[Tensor], model: LoopLM) -> Watch:
    """A `watch` for LoopLM.forward that appends the stream's RMS at each loop's end."""

    def watch(visit: Visit, h: Tensor) -> None:
        if visit.sublayer_index + 1 == len(model.sublayers):
            seen.append(rms(h))

    return watch


@torch.no_grad()
def largest_rms(model: LoopLM, tokens: Tensor) -> str:
    """The visit whose stream is largest, not finite counting as largest of all."""
    seen: list[tuple[float, Visit]] = []
    model(tokens, watch=lambda visit, h: seen.append((rms(h).item(), visit)))
    value, visit = max(seen, key=lambda s: float("inf") if s[0] != s[0] else s[0])
    kind = type(visit.sublayer.branch).__name__
    return f"loop {visit.loop + 1}, sublayer {visit.sublayer_index + 1} ({kind}), RMS {value:.3g}"


class StepMetrics:
    """A step's figures, on the device until someone reads them."""

    def __init__(self, model: LoopLM, watching: bool):
        self.model, self.watching = model, watching
        self.losses: dict[int, Tensor] = {}  # by the loop a segment ends at
        self.z: Tensor | None = None
        self.z_visits: dict[int, int] = {}  # with gradient, in the segment that ends there
        self.loads: Tensor | None = None  # int64 [loops, n_layers, experts]
        self.dropped: Tensor | None = None  # slots over their expert's capacity
        self.rms: list[Tensor] = []
        self.seen: set[Segment] = set()
        self.grad_norm = torch.zeros(())

    def watch(self, segment: Segment) -> Watch | None:
        """Collects the stream's RMS by loop, on the first micro-batch of each segment."""
        if not self.watching or segment in self.seen:
            return None
        self.seen.add(segment)
        return watch_loops(self.rms, self.model)

    def add(self, segment: Segment, piece: Piece, n_tokens: int) -> None:
        """Count what a segment left of one micro-batch of n_tokens."""
        end = segment.loops.stop
        self.losses[end] = self.losses.get(end, 0) + piece.loss
        if piece.z is not None:
            visits = len(segment.loops) * self.model.config.n_layers
            self.z = piece.z if self.z is None else self.z + piece.z
            self.z_visits[end] = visits
        if piece.loads:
            c = self.model.config
            loads = torch.stack(piece.loads).view(-1, c.n_layers, c.moe.experts)
            if self.loads is None:
                self.loads = loads.new_zeros(c.loops, *loads.shape[1:])
            self.loads[end - len(loads) : end] += loads
            cap = next(m.capacity(n_tokens) for m in self.model.modules() if isinstance(m, MoE))
            if cap is not None:
                over = (loads - cap).clamp_min(0).sum()
                self.dropped = over if self.dropped is None else self.dropped + over

    def gather(self, ranks: Ranks) -> None:
        """Sum over the ranks what each saw of the batch."""
        z = [] if self.z is None else [self.z]
        counts = [x for x in (self.loads, self.dropped) if x is not None]
        ranks.all_reduce_([*self.losses.values(), *z, *counts])

    def total(self) -> Tensor:
        """Sum of the segments' losses."""
        return torch.stack(list(self.losses.values())).sum()

    def figures(self) -> dict[str, Any]:
        """What is logged; waits for the device.

        loss is the last segment's, in nats per token: with a step per segment the
        optimizer has by then stepped on this very batch, so that plans compare by
        held-out loss alone. grad_norm is that of the last step, before clipping; z the
        mean over visits of the z-loss term, without its weight.
        """
        losses = [loss.item() for loss in self.losses.values()]
        found: dict[str, Any] = {
            "loss": losses[-1],
            "grad_norm": self.grad_norm.item(),
            "residual_rms": torch.stack(self.rms).tolist(),
        }
        if len(losses) > 1:
            found["segment_losses"] = losses
        if self.z is not None:
            found["z"] = self.z.item() / sum(self.z_visits.values())
        if self.loads is not None:
            found["router_overlap"] = overlap(self.loads).tolist()
            found["load_spread"] = spread(self.loads).tolist()
        if self.loads is not None and self.dropped is not None:
            found["dropped"] = (self.dropped / self.loads.sum()).item()
        return found


def overlap(loads: Tensor) -> Tensor:
    """Cosine between loops of the experts' loads, mean over layers: [loops, loops].

    loads: int64 [loops, n_layers, experts]. 1 where two loops send tokens to the same
    experts (LOOM's Fig. 4: .88-1.00 with a shared router).
    """
    unit = F.normalize(loads.double(), dim=-1)
    return torch.einsum("sme,tme->st", unit, unit) / loads.shape[1]


def spread(loads: Tensor) -> Tensor:
    """Standard deviation of the experts' loads over their mean, by loop: [loops].

    loads: int64 [loops, n_layers, experts]; mean over layers. 0 is even,
    sqrt(experts / top_k - 1) is every token to the same top_k experts.
    """
    x = loads.double()
    return (x.std(-1, correction=0) / x.mean(-1).clamp_min(1)).mean(-1)
