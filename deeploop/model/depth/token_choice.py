"""token_choice: a router gives each token its number of loops, before the first of them.

With router r [R, d_model] on the stream before the first loop, scores p (softmax or sigmoid of its
R logits) and i the highest of them, a token takes loops 1 to i with the weight w = alpha p_i.
`deeploop.model.depth.mor` says what the weight does, and whose keys and values a loop reads. No
token takes a loop past the R-th.

Two terms join the loss: the balance loss R sum_i f_i P_i, f_i the share of a sequence's tokens
with i loops and P_i its mean score (sigmoids divided by their sum), so that it does not depend
on the size of a micro-batch; and the z-loss, the mean squared logsumexp of the logits.

A token's number of loops depends on its own stream alone: training is causal as it is, and equals
generation. How many tokens take a loop is not known beforehand, so all are computed and masked:
this saves no time. With experts, those that are masked still count towards their capacity.

Source: Mixture-of-Recursions, arXiv 2507.10524, of which a router on the first state, top-1 over
numbers of loops, a balance loss and a z-loss are known; the equations above are our reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.model.depth.base import RunLoop
from deeploop.model.depth.mor import TokenRouting, route

if TYPE_CHECKING:
    from deeploop.model.state import LoopInputs, LoopState


class Assigned(NamedTuple):
    """Each token's number of loops, and scalars."""

    loops: Tensor  # int64 [B, T], from 1 to R
    score: Tensor  # [B, T], of that number
    balance: Tensor  # scalar: R sum_i f_i P_i, mean over sequences; 1 where all are as likely
    z: Tensor  # scalar: mean squared logsumexp
    shares: tuple[Tensor, ...] = ()  # scalar of each loop: of the tokens, that took part


class TokenChoice(TokenRouting):
    """Run each token for as many loops as it was given."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.router = nn.Parameter(torch.empty(config.loops, config.d_model))

    @torch.no_grad()
    def init_weights(self) -> None:
        self.router.normal_(std=self.config.d_model**-0.5)

    def loop(self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs) -> LoopState:
        given = s.depth or self.assign(s.h)
        s, w = s._replace(depth=given), self.config.mor.scale * given.score
        took = given.loops > loop
        if loop == 0:
            after = self.run_all(s, loop, run_loop, inputs, w)
        else:
            after = self.run_masked(s, loop, run_loop, inputs, w, took)
        shares = (*given.shares, took.float().mean())
        return after._replace(depth=given._replace(shares=shares))

    def assign(self, h: Tensor) -> Assigned:
        """Give each token of the stream h [B, T, d_model] its number of loops."""
        logits = route(h, self.router)
        p = logits.softmax(-1) if self.config.mor.score == "softmax" else logits.sigmoid()
        best = logits.detach().argmax(-1)
        share = (best[..., None] == torch.arange(p.shape[-1], device=h.device)).to(p).mean(1)
        mean = (p / p.sum(-1, keepdim=True)).mean(1)
        return Assigned(
            best + 1,
            p.gather(-1, best[..., None])[..., 0],
            p.shape[-1] * (share * mean).sum(-1).mean(),
            logits.logsumexp(-1).square().mean(),
        )

    def loops_taken(self, s: LoopState) -> Tensor:
        return s.depth.loops.clamp(max=len(s.depth.shares))

    def penalty(self, s: LoopState) -> Tensor | None:
        mor, given = self.config.mor, s.depth
        return mor.balance * given.balance + mor.z_loss * given.z

    def figures(self, s: LoopState) -> dict[str, Tensor]:
        return {"loop_shares": torch.stack(s.depth.shares)}
