"""expert_choice: each loop takes the tokens that its router scores highest, ever fewer of them.

With router r_t [1, d_model] of loop t, logit g = r_t . h and w = alpha sigmoid(g):

    training    the k = max(1, int(capacity_t T)) tokens of highest g in each sequence, among
                those that took part in the loop before, are gathered, run and scattered once
    elsewhere   a token that took part in the loop before does so again if its logit is above 0

Their streams become those of `deeploop.model.depth.mor`; the other tokens keep theirs for good.
Keys and values of a loop are those of the tokens that take part in it. In loops of capacity 1, and
where the capacity does not fall, nothing is chosen. Loops past the last take its router and
capacity.

The choice of training sees later tokens: a model must not be judged by it. The binary cross-entropy
between logit and choice, a mean over the tokens to choose from and a sum over loops, teaches the
router (or, with causal = router, a second one on the stream without its gradient) to tell the
choice by the token alone. The released code chooses the top k in evaluation, too, and of a single
token, as in generation, always 1.

In eval mode all tokens are computed and masked: it takes as long as without routers. The paper's
warm-up of the capacity is left out.

Source: Mixture-of-Recursions, arXiv 2507.10524, and its code; capacities 1, .., 1/R are linear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.config.depth import capacities, tokens_in_loop
from deeploop.model.depth.base import Depth, RunLoop, choose
from deeploop.model.depth.mor import gather, route, scatter, weighted
from deeploop.utils.errors import InputError

if TYPE_CHECKING:
    from deeploop.model.state import LoopInputs, LoopState


class Routing(NamedTuple):
    """Which tokens have taken part so far, and scalars of each loop, or of those that chose."""

    loops: Tensor  # int64 [B, T] loops that the token has taken
    shares: tuple[Tensor, ...] = ()  # of the tokens, that took part
    fits: tuple[Tensor, ...] = ()  # cross-entropy of telling the choice by the token alone
    told: tuple[Tensor, ...] = ()  # share of the tokens to choose from of which it is told


class ExpertChoice(Depth):
    """Run the highest scored tokens of each loop."""

    changes_stream = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.capacities = capacities(config.mor, config.loops)
        self.routers = self._routers()
        self.causal_routers = self._routers() if config.mor.causal == "router" else None

    def _routers(self) -> nn.ParameterList:
        """Make a router for each loop: separate parameters, as `MoE.routers`."""
        return nn.ParameterList(
            torch.empty(1, self.config.d_model) for _ in range(self.config.loops)
        )

    @torch.no_grad()
    def init_weights(self) -> None:
        for router in (*self.routers, *(self.causal_routers or ())):
            router.normal_(std=self.config.d_model**-0.5)

    def check_cache(self) -> None:
        if self.training:
            raise InputError(
                "cache: depth=expert_choice chooses among all tokens of a sequence in training; "
                "call model.eval() before giving a cache"
            )

    def loop(self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs) -> LoopState:
        before = s.depth or Routing(torch.zeros_like(s.h[..., 0], dtype=torch.int64))
        s = s._replace(depth=before)
        logit = self.logit(self.routers, s.h, loop)
        w = self.config.mor.scale * logit.sigmoid()
        if self.capacity(loop) == 1:
            after, took = run_loop(s, loop, inputs), torch.ones_like(logit, dtype=torch.bool)
            after = after._replace(h=weighted(self.config.mor, s.h, after.h, w), n=None)
            return after._replace(depth=took_part(before, took))
        run = self.run_highest if self.training else self.run_likely
        return run(s, loop, run_loop, inputs, logit, w)

    def run_highest(
        self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs, logit: Tensor,
        w: Tensor,
    ) -> LoopState:  # fmt: skip
        """Run the tokens of highest logit [B, T] among those that took part in the loop before."""
        before, length = s.depth, logit.shape[1]
        open_to = before.loops == loop
        scores = logit.detach().masked_fill(~open_to, -torch.inf)
        k = tokens_in_loop(self.config, loop, length)
        index = scores.topk(k, sorted=False).indices.sort().values
        took = torch.zeros_like(open_to).scatter_(1, index, True)
        routing = took_part(before, took)
        if self.chooses(loop):
            telling = self.telling(s.h, loop, logit)
            fit = F.binary_cross_entropy_with_logits(telling, took.to(logit), reduction="none")
            told = (telling.detach() > 0) == took
            count = open_to.sum()
            routing = routing._replace(
                fits=(*before.fits, torch.where(open_to, fit, 0).sum() / count),
                told=(*before.told, (told & open_to).sum() / count),
            )
        some = gather(s, index)
        after = run_loop(some, loop, inputs.take(index))
        h = weighted(self.config.mor, some.h, after.h, w.gather(1, index))
        return scatter(s, index, after, h)._replace(depth=routing)

    def run_likely(
        self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs, logit: Tensor,
        w: Tensor,
    ) -> LoopState:  # fmt: skip
        """Run the tokens that would likely be chosen in training, told by each token alone."""
        took = s.depth.loops == loop
        if self.chooses(loop):
            took = took & (self.telling(s.h, loop, logit) > 0)
        after = run_loop(s, loop, inputs._replace(valid=took))
        after = after._replace(h=weighted(self.config.mor, s.h, after.h, w))
        return choose(took, after, s)._replace(depth=took_part(s.depth, took))

    def capacity(self, loop: int) -> float:
        """Return the share of the tokens that a loop of training takes."""
        return self.capacities[min(loop, len(self.capacities) - 1)]

    def chooses(self, loop: int) -> bool:
        """Return whether fewer tokens take part in a loop than in the one before it."""
        return self.capacity(loop) < (self.capacity(loop - 1) if loop else 1)

    def logit(self, routers: nn.ParameterList, h: Tensor, loop: int) -> Tensor:
        """Return a loop's logits [B, T] for the stream h [B, T, d_model] before it."""
        return route(h, routers[min(loop, len(routers) - 1)]).squeeze(-1)

    def telling(self, h: Tensor, loop: int, logit: Tensor) -> Tensor:
        """Return the logits [B, T] that tell the choice; logit [B, T] is the router's."""
        if self.causal_routers is None:
            return logit
        return self.logit(self.causal_routers, h.detach(), loop)

    def penalty(self, s: LoopState) -> Tensor | None:
        weight = self.config.mor.causal_weight
        return weight * torch.stack(s.depth.fits).sum() if weight and s.depth.fits else None

    def figures(self, s: LoopState) -> dict[str, Tensor]:
        figures = {"loop_shares": torch.stack(s.depth.shares)}
        if s.depth.told:
            figures["choice_told"] = torch.stack(s.depth.told).mean()
        return figures


def took_part(before: Routing, took: Tensor) -> Routing:
    """Count a loop for the tokens of bool took [B, T]."""
    share = took.to(torch.float32).mean()
    return before._replace(loops=before.loops + took, shares=(*before.shares, share))
