"""Measure a reasoner by the number of segments: right answers, and where it would halt."""

from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.config import Config
from deeploop.data.batches import IGNORE
from deeploop.data.puzzles.puzzle_set import Examples
from deeploop.data.puzzles.source import PuzzleSource
from deeploop.eval.validate import Stop, held_out_targets
from deeploop.model.reasoner import Carry, Reasoner
from deeploop.model.stablemax import stablemax_cross_entropy
from deeploop.utils.device import autocast
from deeploop.utils.distributed import Ranks


class BySegment(NamedTuple):
    """Figures after each segment, and of halting by the q head; means over examples."""

    loss: list[float]  # stablemax cross-entropy, nats per label
    token: list[float]  # share of the labels that are right
    exact: list[float]  # share of the examples with every label right
    wants: list[float]  # share that the q head would have halted by then
    early_exact: float  # as exact, each example where the q head halts it
    mean_segments: float  # where it halts them


@torch.no_grad()
def by_segment(
    model: Reasoner,
    corpus: PuzzleSource,
    config: Config,
    batch: int,
    ranks: Ranks = Ranks(),  # noqa: B008
    stop: Stop = lambda done: False,
    tokens: int | None = None,
) -> BySegment | None:
    """Measure a model on held-out examples after each of its segments.

    Args:
        batch: examples at once.
        ranks: the batches are dealt out to these in turn; every rank returns the means.
        stop: called after each batch with the number of cells read; True ends the validation.
        tokens: cells to read; None: train.eval_tokens.

    Returns None where `stop` ended it.
    """
    device, most = model.head.device, config.model.reasoner.segments
    sums = torch.zeros(4, most, dtype=torch.float64, device=device)
    early = torch.zeros(3, dtype=torch.float64, device=device)  # exact, segments, examples
    count = held_out_targets(corpus, config.train.eval_tokens if tokens is None else tokens)
    training, done = model.training, 0
    model.eval()
    try:
        for index, examples in enumerate(corpus.held_out_examples(batch, count)):
            done = min(count, done + examples.inputs.numel())
            if index % ranks.world == ranks.rank:
                add(model, config, Examples(*(x.to(device) for x in examples)), sums, early)
            last = index % ranks.world == ranks.world - 1
            if last and ranks.any_rank(stop(done)):
                return None
    finally:
        model.train(training)
    ranks.all_reduce_([sums, early])
    exact, segments, n = early.tolist()
    loss, token, exact_by, wants = (sums / n).tolist()
    return BySegment(loss, token, exact_by, wants, exact / n, segments / n)


def add(model: Reasoner, config: Config, batch: Examples, sums: Tensor, early: Tensor) -> None:
    """Run all segments on a batch on the model's device; adds its figures to `by_segment`'s."""
    answers, most = batch.targets != IGNORE, config.model.reasoner.segments
    labels, carry = answers.sum(-1).clamp_min(1), model.start(len(batch.inputs))
    halted = torch.zeros(len(batch.inputs), dtype=torch.bool, device=batch.inputs.device)
    for segment in range(1, most + 1):
        with autocast(batch.inputs.device, config.train.precision):
            end = model(batch.inputs, batch.puzzles, carry)
            logits = model.logits(end.n)
        carry, wants = end.carry, model.halts(end.q)
        loss = stablemax_cross_entropy(logits, batch.targets).sum(-1) / labels
        right = (logits.argmax(-1) == batch.targets) & answers
        exact = (right | ~answers).all(-1)
        halts = ~halted & (wants | (segment == most))
        halted = halted | wants
        figures = loss.sum(), (right.sum(-1) / labels).sum(), exact.sum(), halted.sum()
        sums[:, segment - 1] += torch.stack([x.double() for x in figures])
        early.add_(torch.stack([(halts & exact).sum(), halts.sum() * segment, halts.sum()]))


@torch.no_grad()
def answer(
    model: Reasoner, config: Config, batch: Examples, early: bool = True
) -> tuple[Tensor, Tensor]:
    """Answer puzzles: the labels int64 [B, T], and the segments that each took, int64 [B].

    Args:
        model: in eval mode.
        config: of its run.
        batch: examples on the model's device; targets are not read.
        early: end each example where the Q head halts it. Those that go on are gathered, so the
            time is that of the segments taken; the host waits for their number in each. Else all
            examples take all segments.
    """
    inputs, _, puzzles = batch
    labels, taken = torch.zeros_like(inputs), torch.zeros_like(puzzles)
    places, carry = torch.arange(len(inputs), device=inputs.device), model.start(len(inputs))
    for segment in range(1, config.model.reasoner.segments + 1):
        with autocast(inputs.device, config.train.precision):
            end = model(inputs[places], puzzles[places], carry)
            labels[places] = model.logits(end.n).argmax(-1)
        taken[places] = segment
        carry = end.carry
        if early:
            on = (~model.halts(end.q)).nonzero()[:, 0]
            places, carry = places[on], Carry(*(z[on] for z in carry))
            if not len(places):
                break
    return labels, taken
