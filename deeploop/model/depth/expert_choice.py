"""expert_choice: each loop takes the tokens that its router scores highest, ever fewer of them.

With router r_t [1, d_model] of loop t, logit g = r_t . h and w = alpha sigmoid(g):

    training    the k = max(1, int(capacity_t T)) tokens of highest g in each sequence, among
                those that took part in the loop before, are gathered, run and scattered once
    elsewhere   a token that took part in the loop before does so again if its logit is above 0

`deeploop.model.depth.mor` says what the weight does, and whose keys and values a loop reads. A
token that is not chosen keeps its stream for good. In loops of capacity 1, and where the capacity
does not fall, nothing is chosen. Loops past the last take its router and capacity.

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
from deeploop.model.depth.base import RunLoop
from deeploop.model.depth.mor import TokenRouting, route
from deeploop.utils.errors import InputError

if TYPE_CHECKING:
    from deeploop.model.state import LoopInputs, LoopState


class Routing(NamedTuple):
    """Which tokens have taken part so far, and scalars of each loop, or of those that chose."""

    loops: Tensor  # int64 [B, T] loops that the token has taken
    shares: tuple[Tensor, ...] = ()  # of the tokens, that took part
    fits: tuple[Tensor, ...] = ()  # cross-entropy of telling the choice by the token alone
    told: tuple[Tensor, ...] = ()  # share of the tokens to choose from of which it is told


class ExpertChoice(TokenRouting):
    """Run the highest scored tokens of each loop."""

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

    def loop(self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs) -> LoopState:
        if self.training and inputs.cached:
            raise InputError(
                "cache: depth=expert_choice chooses among all tokens of a sequence in training; "
                "call model.eval() before giving a cache"
            )
        routing = s.depth or Routing(torch.zeros_like(s.h[..., 0], dtype=torch.int64))
        s = s._replace(depth=routing)
        logit = self.logit(self.routers, s.h, loop)
        w = self.config.mor.scale * logit.sigmoid()
        if self.capacity(loop) == 1:
            took = torch.ones_like(logit, dtype=torch.bool)
            after = self.run_all(s, loop, run_loop, inputs, w)
        elif self.training:
            places, took = self.highest(logit, routing, loop)
            routing = self.judged(routing, self.telling(s.h, loop, logit), took, loop)
            after = self.run_some(s, loop, run_loop, inputs, w, places)
        else:
            took = routing.loops == loop
            if self.chooses(loop):
                took = took & (self.telling(s.h, loop, logit) > 0)
            after = self.run_masked(s, loop, run_loop, inputs, w, took)
        return after._replace(
            depth=routing._replace(
                loops=routing.loops + took, shares=(*routing.shares, took.float().mean())
            )
        )

    def highest(self, logit: Tensor, routing: Routing, loop: int) -> tuple[Tensor, Tensor]:
        """Return the places [B, k] of the highest logits [B, T], rising, and bool [B, T] of them.

        Only tokens that took part in the loop before are chosen.
        """
        scores = logit.detach().masked_fill(routing.loops != loop, -torch.inf)
        k = tokens_in_loop(self.config, loop, logit.shape[1])
        places = scores.topk(k, sorted=False).indices.sort().values
        return places, torch.zeros_like(scores, dtype=torch.bool).scatter_(1, places, True)

    def judged(self, routing: Routing, telling: Tensor, took: Tensor, loop: int) -> Routing:
        """Add how well logits `telling` [B, T] tell the choice took [B, T], where there is one."""
        if not self.chooses(loop):
            return routing
        may = routing.loops == loop
        fit = F.binary_cross_entropy_with_logits(telling, took.to(telling), reduction="none")
        told, count = (telling.detach() > 0) == took, may.sum()
        return routing._replace(
            fits=(*routing.fits, torch.where(may, fit, 0).sum() / count),
            told=(*routing.told, (told & may).sum() / count),
        )

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

    def loops_taken(self, s: LoopState) -> Tensor:
        return s.depth.loops

    def penalty(self, s: LoopState) -> Tensor | None:
        weight = self.config.mor.causal_weight
        return weight * torch.stack(s.depth.fits).sum() if weight and s.depth.fits else None

    def figures(self, s: LoopState) -> dict[str, Tensor]:
        figures = {"loop_shares": torch.stack(s.depth.shares)}
        if s.depth.told:
            figures["choice_told"] = torch.stack(s.depth.told).mean()
        return figures
