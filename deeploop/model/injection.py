"""Mix the loops' input e into the state s at the start of a loop: `model.inject`.

    none          s
    convex        (1 - g_t) s + g_t e          g_t = 1 / (2 t sqrt K), LOOM's weights
    add           s + e
    adapter       A s + B e                    a linear map of [s; e], 2d -> d
    contractive   a * s + dt * (B e)           0 < a = exp(-dt exp(A_log)) < 1 for each channel,
                                               dt = softplus(dt_raw)

convex and add do nothing in the first loop where the state starts as e (`model.start`); the others
act in every loop. B e is the same in all loops, and computed once.

Sources: LOOM, arXiv 2610.01153 (convex); HRM, arXiv 2506.21734 (add); Huginn, arXiv 2502.05171
(adapter); Parcae (contractive: the linear recurrence has a spectral radius under 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.config.scaling import convex_weight
from deeploop.kernels import inject

if TYPE_CHECKING:
    from deeploop.model.state import LoopState, Visit

INITIAL_DECAY = math.sqrt(1 / 5)  # a, where A_log starts at 0


class Injection(nn.Module):
    """add: s + e; the base of the others."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config

    def init_weights(self) -> None:
        """Fill the weights; here there are none."""

    def undecayed(self) -> Iterable[nn.Parameter]:
        """Return the weights that weight decay leaves alone, beside gains; here there are none."""
        return ()

    def figures(self) -> dict[str, Tensor]:
        """Return figures of the weights to log, scalars; here there are none."""
        return {}

    def prepare(self, e: Tensor) -> Tensor:
        """Turn the loops' input e [B, T, d_model] into the summand of every loop, in its dtype."""
        return e

    def terms(self, h: Tensor, x: Tensor, loop: int) -> tuple[Tensor, Tensor, float, float] | None:
        """Return two summands and their factors; None: the state stays as it is.

        Args:
            h: stream [B, T, d_model].
            x: `prepare(e)`.
            loop: counted from 0.
        """
        return (h, x, 1.0, 1.0) if self.acts(loop) else None

    def acts(self, loop: int) -> bool:
        """Return whether e itself is mixed in at the start of a loop counted from 0."""
        return loop > 0 or self.config.start == "noise"

    def forward(self, s: LoopState, x: Tensor, visit: Visit, norm: bool = True) -> LoopState:
        """Mix x into the stream and norm the sum for the loop's first visit, in one kernel.

        Args:
            s: state before the loop; h [B, T, d_model] keeps its dtype.
            x: `prepare(e)`.
            visit: the first visit of the loop.
            norm: False leaves the norm out, and n None.
        """
        assert visit.loop is not None
        terms = self.terms(s.h, x, visit.loop)
        if terms is None:
            return s
        first, second, keep, add = terms
        gain = visit.gain_in if norm else None
        h, n = inject(first, second, gain, keep, add, self.config.norm_eps, norm=norm)
        return s._replace(h=h, n=n)


class Convex(Injection):
    """convex: (1 - g_t) s + g_t e."""

    def terms(self, h: Tensor, x: Tensor, loop: int) -> tuple[Tensor, Tensor, float, float] | None:
        g = convex_weight(loop + 1, self.config.n_layers)
        return (h, x, 1 - g, g) if self.acts(loop) else None


class Adapter(Injection):
    """adapter: W [s; e]; the halves A and B of W are applied one after the other, e first.

    W starts as [I, 0], so that the loops see the state alone, or as Huginn's: normal, with a
    standard deviation of sqrt(2 / (5 d_model)).
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.linear = nn.Linear(2 * config.d_model, config.d_model, bias=False)

    @torch.no_grad()
    def init_weights(self) -> None:
        d = self.config.d_model
        if self.config.adapter_init == "identity":
            self.linear.weight.copy_(torch.eye(d, 2 * d))
        else:
            std = math.sqrt(2 / (5 * d))
            # Cut at 3 deviations, by the inverse of the distribution function: torch's rejection
            # reads values back, which neither fake nor meta tensors have.
            edge = math.erf(3 / math.sqrt(2))
            self.linear.weight.uniform_(-edge, edge).erfinv_().mul_(std * math.sqrt(2))

    def prepare(self, e: Tensor) -> Tensor:
        return F.linear(e, self.linear.weight[:, self.config.d_model :]).to(e.dtype)

    def terms(self, h: Tensor, x: Tensor, loop: int) -> tuple[Tensor, Tensor, float, float]:
        return x, F.linear(h, self.linear.weight[:, : self.config.d_model]), 1.0, 1.0


class Contractive(Injection):
    """contractive: a * s + dt * (B e), with a = exp(-dt exp(A_log)) and dt = softplus(dt_raw).

    Starts as Parcae's: A_log 0, a = sqrt(1/5), B the identity. None of the three has weight decay.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.log_rate = nn.Parameter(torch.empty(config.d_model))  # A_log
        self.raw_step = nn.Parameter(torch.empty(config.d_model))  # dt_raw
        self.linear = nn.Linear(config.d_model, config.d_model, bias=False)  # B

    @torch.no_grad()
    def init_weights(self) -> None:
        nn.init.eye_(self.linear.weight)
        self.log_rate.zero_()
        step = -math.log(INITIAL_DECAY)
        self.raw_step.fill_(math.log(math.expm1(step)))  # the inverse of softplus

    def undecayed(self) -> Iterable[nn.Parameter]:
        return self.parameters()

    def figures(self) -> dict[str, Tensor]:
        return {"largest_decay": self.decay().detach().max()}

    def prepare(self, e: Tensor) -> Tensor:
        return (F.softplus(self.raw_step) * F.linear(e, self.linear.weight)).to(e.dtype)

    def terms(self, h: Tensor, x: Tensor, loop: int) -> tuple[Tensor, Tensor, float, float]:
        return h * self.decay().to(h.dtype), x, 1.0, 1.0

    def decay(self) -> Tensor:
        """Return a [d_model], each in (0, 1)."""
        return torch.exp(-F.softplus(self.raw_step) * self.log_rate.exp())


INJECTIONS = {
    "add": Injection, "convex": Convex, "adapter": Adapter, "contractive": Contractive,
}  # fmt: skip


def injection(config: ModelConfig) -> Injection | None:
    """Make the injection that `config.inject` names; None for none."""
    return None if config.inject == "none" else INJECTIONS[config.inject](config)
