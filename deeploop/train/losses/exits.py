"""Losses over the exit probabilities p_t of a gate after each loop (`deeploop.model.depth.gate`).

    expected   sum over t of p_t L_t - beta H(p)             Ouro, stage I: a uniform prior
    ponder     sum over t of p_t L_t + beta KL(p || prior)   PonderNet: a geometric prior
    gate       the gate alone, the rest frozen: each token's 1 - lambda_{t-1}, of going on to
               loop t, is fitted to sigmoid(50 (I_t - .005)), I_t = max(0, L_{t-1} - L_t), for
               t = 2..R; the sum over t is divided by R                   Ouro, stage II

L_t is a token's cross-entropy after loop t, H the entropy. The prior of ponder is
lambda (1 - lambda)^(t-1) over the loops that are run, divided by its sum.

Different here: Ouro writes 1 - lambda_t for the gain I_t of loop t itself. Then the first loop's
gate would never be trained, and the last loop's, which nothing reads, would.

Sources: Ouro, arXiv 2510.25741; PonderNet, arXiv 2107.05407 (beta .01, lambda .2; a widely copied
implementation takes KL(prior || p) and leaves the truncated prior's sum below 1).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.model.depth.gate import log_exit_distribution
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import loop_cross_entropy
from deeploop.train.losses.base import LoopEnds, Loss, LossTerms, sum_over_targets

STEEPNESS, LEAST_GAIN = 50.0, 0.005  # of Ouro's stage II: per nat, nats


class Exits(Loss):
    """The expected loss under the exit distribution, and a term that keeps it from collapsing."""

    @abstractmethod
    def regulariser(self, log_p: Tensor) -> Tensor:
        """Return the term of each token that beta multiplies: log p [R, B, T] -> [B, T]."""

    def __call__(self, ends: LoopEnds, targets: Tensor, chunk_rows: int | None) -> LossTerms:
        log_p = log_exit_distribution(torch.stack(ends.logits))
        p = log_p.exp()
        expected, losses = loop_cross_entropy(ends.states, ends.model.head, targets, p, chunk_rows)
        kept = sum_over_targets(self.regulariser(log_p), targets)
        by_loop = losses.flatten(1).sum(1)
        loops = torch.arange(1, len(p) + 1, dtype=p.dtype, device=p.device)
        figures = {
            "expected_loss": expected,
            "exit_entropy": sum_over_targets(entropy(log_p), targets),
            "loop_losses": by_loop,
            "exit_loop": sum_over_targets((loops[:, None, None] * p).sum(0), targets),
        }
        total = expected + self.config.exit_weight * kept
        return LossTerms(total, by_loop[-1], {k: v.detach() for k, v in figures.items()})


class Expected(Exits):
    """Ouro's stage I: minus the entropy."""

    def regulariser(self, log_p: Tensor) -> Tensor:
        return -entropy(log_p)


class Ponder(Exits):
    """PonderNet: the divergence from a geometric prior."""

    def regulariser(self, log_p: Tensor) -> Tensor:
        log_prior = log_geometric(self.config.exit_prior, len(log_p)).to(log_p)
        return (log_p.exp() * (log_p - log_prior[:, None, None])).sum(0)


class GateAlone(Loss):
    """Ouro's stage II: the gate learns whether the next loop lowers a token's loss."""

    def trained(self, model: LoopLM) -> Iterable[Tensor]:
        return model.depth.parameters()

    def __call__(self, ends: LoopEnds, targets: Tensor, chunk_rows: int | None) -> LossTerms:
        states = [n.detach() for n in ends.states]
        with torch.no_grad():
            _, losses = loop_cross_entropy(states, ends.model.head, targets, chunk_rows=chunk_rows)
        gain = (losses[:-1] - losses[1:]).clamp_min(0)
        wanted = (STEEPNESS * (gain - LEAST_GAIN)).sigmoid()  # to go on from loop t - 1 to loop t
        logits = torch.stack(ends.logits)
        fit = F.binary_cross_entropy_with_logits(-logits[:-1], wanted, reduction="none").sum(0)
        total = sum_over_targets(fit, targets) / len(logits)
        by_loop = losses.flatten(1).sum(1)
        return LossTerms(total, by_loop[-1], {"gate_loss": total.detach(), "loop_losses": by_loop})


def entropy(log_p: Tensor) -> Tensor:
    """Return the entropy in nats: log p [R, ...] -> [...]."""
    return -(log_p.exp() * log_p).sum(0)


def log_geometric(exit_probability: float, loops: int) -> Tensor:
    """Return the logarithm of a geometric distribution cut after `loops` loops: [loops]."""
    t = torch.arange(loops, dtype=torch.float64)
    return (t * math.log1p(-exit_probability)).log_softmax(0)
