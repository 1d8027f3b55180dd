"""The contract of a loss, and the two without exit probabilities.

    last   the cross-entropy after the last loop
    each   the mean of the cross-entropies after every loop; gradients are not cut between loops

With backprop = last(k), each is the mean over the last k loops (arXiv 2311.12424). Logits of two
loops are never alive at once (`deeploop.model.loss`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.config import TrainConfig
from deeploop.data.batches import IGNORE
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import loop_cross_entropy
from deeploop.model.state import LoopState, OnVisit


class LoopEnds:
    """The states after the loops of a segment, as the head and an exit gate read them."""

    def __init__(self, model: LoopLM, tokens: Tensor, on_visit: OnVisit | None = None):
        self.model, self.tokens, self.on_visit = model, tokens, on_visit
        self.states: list[Tensor] = []  # [B, T, d_model] of each loop, final and normalised
        self.logits: list[Tensor] = []  # [B, T] of each loop, of leaving there

    def add(self, s: LoopState) -> None:
        """Read a state after a loop; an `on_loop` of LoopLM.run."""
        s = self.model.after_loops(s._replace(n=None))
        logit = self.model.depth.exit_logit(s)
        if logit is not None:
            self.logits.append(logit)
        self.states.append(self.model.coda_output(s, self.tokens))

    def add_last(self, s: LoopState) -> None:
        """Read the state after the last loop, which is normed for the head already."""
        self.states.append(self.model.output(s, self.tokens, on_visit=self.on_visit))


class LossTerms(NamedTuple):
    """Sums over the targets of a micro-batch."""

    total: Tensor  # scalar with gradient
    loss: Tensor  # scalar: cross-entropy after the last loop, nats
    figures: dict[str, Tensor]  # to log: scalars, and cross-entropies after each loop [R]


class Loss(ABC):
    """Turn the states after loops into a scalar to differentiate."""

    each_loop = True  # whether it reads the states after all loops of a segment, or the last alone

    def __init__(self, config: TrainConfig):
        self.config = config

    def trained(self, model: LoopLM) -> Iterable[Tensor]:
        """Return the parameters that this loss trains."""
        return model.parameters()

    def freeze_others(self, model: LoopLM) -> None:
        """Leave only the parameters that this loss trains with gradients."""
        model.requires_grad_(False)
        for p in self.trained(model):
            p.requires_grad_(True)

    @abstractmethod
    def __call__(self, ends: LoopEnds, targets: Tensor, chunk_rows: int | None) -> LossTerms:
        """Compute the loss: targets int64 [B, T], IGNORE left out."""


class Last(Loss):
    """The cross-entropy after the last loop."""

    each_loop = False

    def __call__(self, ends: LoopEnds, targets: Tensor, chunk_rows: int | None) -> LossTerms:
        head = ends.model.head
        total, _ = loop_cross_entropy(ends.states, head, targets, chunk_rows=chunk_rows)
        return LossTerms(total, total, {})


class Each(Loss):
    """The mean of the cross-entropies after every loop."""

    def __call__(self, ends: LoopEnds, targets: Tensor, chunk_rows: int | None) -> LossTerms:
        total, losses = loop_cross_entropy(
            ends.states, ends.model.head, targets, chunk_rows=chunk_rows
        )
        by_loop = losses.flatten(1).sum(1)
        return LossTerms(total / len(by_loop), by_loop[-1], {"loop_losses": by_loop})


def valid(targets: Tensor) -> Tensor:
    """Return which targets count: bool, of their shape."""
    return targets != IGNORE


def sum_over_targets(x: Tensor, targets: Tensor) -> Tensor:
    """Sum x [..., B, T] over the targets that count: [...]."""
    return torch.where(valid(targets), x, 0.0).flatten(-2).sum(-1)
