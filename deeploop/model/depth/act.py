"""act: a token halts once its halting probabilities add up to 1 (adaptive computation time).

Before loop t, p_t = sigmoid(linear(h + the loop's sinusoid, if model.loop_signal = add)). With H
the sum of a token's p so far, the loop's weight is

    w_t = p_t           while H + p_t <= 1 - epsilon
          1 - H         in the loop in which it is not, or in the last: the token has halted
          0             after that; its state stays as it is

so that the weights of a token sum to 1. The head reads y, the weighted mean of the states after
the loops (Graves), or the released Universal Transformer's y <- w_t s_t + (1 - w_t) y. The
penalty is tau (loops taken + the last weight), its mean over tokens; only the weight carries
gradient.

A halted token still gives keys and values in every loop, those of the state it halted in. All
tokens are computed in every loop: halting saves no time here.

Sources: Graves, arXiv 1603.08983; Universal Transformer, arXiv 1807.03819 (bias 1, epsilon .01,
tau .01; its code drops a pair of parentheses in y, and forces no halt in the last loop).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.model.depth.base import Depth, RunLoop, choose
from deeploop.model.loop_signal import sinusoid

if TYPE_CHECKING:
    from deeploop.model.state import LoopInputs, LoopState


class Halting(NamedTuple):
    """Each token's halting, after some loops."""

    total: Tensor  # [B, T] H, the sum of the weights; exactly 1 once the token has halted
    weight: Tensor  # [B, T] w of the last loop
    remainder: Tensor  # [B, T] w of the loop in which the token halted; 0 before
    loops: Tensor  # [B, T] loops that the token has taken
    mean: Tensor | None  # [B, T, d_model] y without the last loop's state; None: no loop before


class ACT(Depth):
    """Halt each token by the sum of its halting probabilities."""

    changes_stream = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.halt = nn.Linear(config.d_model, 1)

    @torch.no_grad()
    def init_weights(self) -> None:
        self.halt.weight.zero_()
        self.halt.bias.fill_(self.config.act.bias)

    def loop(self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs) -> LoopState:
        before = s.depth
        p = self.probability(s.h, loop)
        if before is None:
            zero = torch.zeros_like(p)
            before = Halting(zero, zero, zero, zero, None)
            mean = None
        else:
            mean = self.mix(before.mean, s.h, before.weight)
        running = before.total < 1
        halts = running & (before.total + p > 1 - self.config.act.epsilon)
        weight = torch.where(halts, 1 - before.total, torch.where(running, p, 0.0))
        halting = Halting(
            torch.where(halts, 1.0, before.total + weight),
            weight,
            torch.where(halts, weight, before.remainder),
            before.loops + running,
            mean,
        )
        return choose(running, run_loop(s, loop, inputs), s)._replace(depth=halting)

    def probability(self, h: Tensor, loop: int) -> Tensor:
        """Return p [B, T] of halting in a loop: stream h [B, T, d_model] before it."""
        if self.config.loop_signal == "add":
            h = h + sinusoid(loop, h.shape[-1], like=h)
        with torch.autocast(h.device.type, enabled=False):
            return F.linear(h, self.halt.weight, self.halt.bias).squeeze(-1).sigmoid()

    def mix(self, mean: Tensor | None, h: Tensor, weight: Tensor) -> Tensor:
        """Add a loop's state h [B, T, d_model] to the output so far, with weight [B, T]."""
        w = weight[..., None]
        if mean is None:
            return w * h
        keep = 1 - w if self.config.act.output == "interpolate" else 1.0
        return keep * mean + w * h

    def readout(self, s: LoopState) -> LoopState:
        t = s.depth
        return s._replace(h=self.mix(t.mean, s.h, t.weight + (1 - t.total)), n=None)

    def ponder(self, s: LoopState) -> Tensor:
        """Return the loops taken and the last weight, added up: [B, T]."""
        t = s.depth
        forced = torch.where(t.total < 1, t.weight + (1 - t.total), 0.0)
        return t.loops + t.remainder + forced

    def penalty(self, s: LoopState) -> Tensor | None:
        tau = self.config.act.ponder_weight
        return tau * self.ponder(s).mean() if tau else None

    def loops_taken(self, s: LoopState) -> Tensor:
        return s.depth.loops

    def figures(self, s: LoopState) -> dict[str, Tensor]:
        return {"act_loops": s.depth.loops.mean()}
