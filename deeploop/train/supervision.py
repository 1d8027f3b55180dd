"""Deep supervision: a sequence stays for several steps, each with a loss, until it halts.

Every step runs one segment of each row of the batch: the states that the row carries, without
gradient, through the model once more, a loss on its output (`deeploop.train.losses.reasoner`), and
an optimizer step. A row that has halted (`deeploop.train.halting`) takes its sequence of the step's
batch and starts anew; the other sequences of that batch are not read. So the rows of a batch are at
different segments.

Sources: HRM, arXiv 2506.21734, section 2, and its code; TRM, arXiv 2510.04871.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.config import Config
from deeploop.data.puzzles.puzzle_set import Examples
from deeploop.model.reasoner import Carry, Reasoner
from deeploop.train.halting import halted
from deeploop.train.losses.reasoner import continue_target, segment_loss
from deeploop.utils.device import autocast
from deeploop.utils.spans import span


class Rows(NamedTuple):
    """The sequences that this rank's rows of the batch have, and how far each is."""

    carry: Carry  # after the last segment, without gradient
    examples: Examples
    steps: Tensor  # int64 [B], segments taken
    least: Tensor  # int64 [B], segments before which it may not halt
    halted: Tensor  # bool [B]; the next step starts these rows anew


class SegmentResult(NamedTuple):
    """The rows after a segment, and its figures: sums over rows, on the device."""

    rows: Rows
    sums: dict[str, Tensor]


def first_rows(model: Reasoner, examples: Examples) -> Rows:
    """Return rows that all start anew with the next batch, like `examples` in shape."""
    count, device = len(examples.inputs), examples.inputs.device
    steps = torch.zeros(count, dtype=torch.int64, device=device)
    every = torch.ones_like(steps, dtype=torch.bool)
    return Rows(model.start(count), examples, steps, torch.ones_like(steps), every)


def refill(model: Reasoner, rows: Rows, new: Examples, least: Tensor) -> Rows:
    """Give the rows that have halted the next sequences, and their states the start again.

    Args:
        new: a sequence for each row.
        least: int64 [B], of `least_segments` for these.
    """
    ended = rows.halted
    examples = Examples(*(choose(ended, a, b) for a, b in zip(new, rows.examples, strict=True)))
    return Rows(
        model.reset(rows.carry, ended), examples, rows.steps.masked_fill(ended, 0),
        torch.where(ended, least, rows.least), torch.zeros_like(ended),
    )  # fmt: skip


def choose(where: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the rows of a [B, ...] where `where` [B] is true, else those of b."""
    return torch.where(where.view(-1, *[1] * (a.dim() - 1)), a, b)


def run_segment(model: Reasoner, config: Config, rows: Rows) -> SegmentResult:
    """Run forward, loss and backward of one segment of some rows; gradients add up.

    Args:
        model: its parameters' .grad receive the gradients.
        config: halting, precision and the global batch size are read.
        rows: after `refill`.
    """
    r, t, (inputs, targets, puzzles) = config.model.reasoner, config.train, rows.examples
    steps = rows.steps + 1
    with span("forward"), autocast(inputs.device, t.precision):
        end = model(inputs, puzzles, rows.carry)
        logits, target = model.logits(end.n), None
        if r.halting == "halt_continue":
            with torch.no_grad():
                after = model(inputs, puzzles, end.carry)
            target = continue_target(after.q, steps >= r.segments)
    with span("loss"):
        loss = segment_loss(logits, end.q, targets, t.batch_size, target)
    with span("backward"):
        loss.total.backward()
    ended = halted(end.q.detach(), steps, rows.least, r, training=True)
    done = ended.double()
    sums = {
        "answers": loss.cross_entropy, "q_halt": loss.q_halt, "q_continue": loss.q_continue,
        "token": loss.right / loss.labels.clamp(min=1), "exact": loss.exact, "halted": done,
        "halted_exact": done * loss.exact, "halted_steps": done * steps,
    }  # fmt: skip
    if target is None:
        del sums["q_continue"]
    rows = rows._replace(carry=end.carry, steps=steps, halted=ended)
    return SegmentResult(rows, {name: x.double().sum() for name, x in sums.items()})
