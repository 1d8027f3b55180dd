"""Deep supervision: a sequence stays for several steps, each with a loss, until it halts.

Every step runs one segment of each row of the batch: the states that the row carries, without
gradient, through the model once more, a loss on its output, and an optimizer step. A row that has
halted takes the next sequence and starts anew. So the rows of a batch are at different segments.

    loss      mean over rows of (mean stablemax cross-entropy of the row's labels
              + 1/2 (BCE(q_halt, all labels right) + BCE(q_continue, target)))
    halted    after `segments`, or where q_halt > q_continue; with probability `exploration` not
              before a number of segments drawn evenly from 2 to `segments`
    target    sigmoid of q_halt of the segment to come if it is the last, else of its larger q

With halting=halt (TRM) there is no q_continue, and q_halt > 0 halts.

Sources: HRM, arXiv 2506.21734, section 2 and its code; TRM, arXiv 2510.04871.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.config import Config
from deeploop.config.reasoner import ReasonerConfig
from deeploop.data.batches import IGNORE, mix
from deeploop.data.puzzles.puzzle_set import Examples
from deeploop.model.reasoner import Carry, Reasoner
from deeploop.model.stablemax import stablemax_cross_entropy
from deeploop.utils.device import autocast
from deeploop.utils.spans import span


class Rows(NamedTuple):
    """The sequences that this rank's rows of the batch have, and how far each is."""

    carry: Carry  # after the last segment, without gradient
    examples: Examples
    steps: Tensor  # int32 [B], segments taken
    halted: Tensor  # bool [B]; the next step starts these rows anew


class SegmentResult(NamedTuple):
    """The rows after a segment, and its figures: sums over rows, on the device."""

    rows: Rows
    sums: dict[str, Tensor]


def first_rows(model: Reasoner, examples: Examples) -> Rows:
    """Return rows that all start anew with the next batch, like `examples` in shape."""
    count, device = len(examples.inputs), examples.inputs.device
    steps = torch.zeros(count, dtype=torch.int32, device=device)
    return Rows(model.start(count), examples, steps, torch.ones_like(steps, dtype=torch.bool))


def refill(model: Reasoner, rows: Rows, new: Examples) -> Rows:
    """Give the rows that have halted the next sequences, and their states the start again."""
    halted = rows.halted
    examples = Examples(*(choose(halted, a, b) for a, b in zip(new, rows.examples, strict=True)))
    steps = rows.steps.masked_fill(halted, 0)
    return Rows(model.reset(rows.carry, halted), examples, steps, torch.zeros_like(halted))


def choose(where: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the rows of a [B, ...] where `where` [B] is true, else those of b."""
    return torch.where(where.view(-1, *[1] * (a.dim() - 1)), a, b)


def least_segments(r: ReasonerConfig, seed: int, step: int, rows: range) -> Tensor:
    """Draw before which segment each row may not halt in this step: int32 [rows].

    A pure function of (seed, step, row): 1, or with probability `exploration` a number drawn
    evenly from 2 to `segments`.
    """
    key = mix(np.array([seed % (1 << 64)], np.uint64)) ^ np.uint64(step)
    words = mix(mix(key) + np.arange(rows.start, rows.stop, dtype=np.uint64))
    explores = (words >> np.uint64(11)) * 2.0**-53 < r.exploration
    drawn = 2 + mix(words) % np.uint64(max(1, r.segments - 1))
    return torch.from_numpy(np.where(explores, drawn, 1).astype(np.int32))


def run_segment(model: Reasoner, config: Config, rows: Rows, least: Tensor) -> SegmentResult:
    """Run forward, loss and backward of one segment of some rows; gradients add up.

    Args:
        model: its parameters' .grad receive the gradients.
        config: halting, precision and the global batch size are read.
        rows: after `refill`.
        least: int32 [B], of `least_segments`.
    """
    r, t, examples = config.model.reasoner, config.train, rows.examples
    with span("forward"), autocast(examples.inputs.device, t.precision):
        end = model(examples.inputs, examples.puzzles, rows.carry)
        logits = model.logits(end.n)
    with span("loss"):
        answers = examples.targets != IGNORE
        right = (logits.detach().argmax(-1) == examples.targets) | ~answers
        exact = right.all(-1)
        labels = answers.sum(-1).clamp_min(1)
        per_row = stablemax_cross_entropy(logits, examples.targets).sum(-1) / labels
        q_halt, q_continue = end.q.float().unbind(-1)
        halt_loss = F.binary_cross_entropy_with_logits(q_halt, exact.float(), reduction="sum")
        steps = rows.steps + 1
        last = steps >= r.segments
        terms = {"answers": per_row.sum(), "halt": halt_loss}
        if r.halting == "halt_continue":
            target = continue_target(model, config, examples, end.carry, last)
            terms["continue"] = F.binary_cross_entropy_with_logits(
                q_continue, target, reduction="sum"
            )
        halted = last | (model.halts(end.q) & (steps >= least))
        total = terms["answers"] + 0.5 * sum(v for k, v in terms.items() if k != "answers")
    with span("backward"):
        (total / t.batch_size).backward()
    done = halted.float()
    sums = {name: value.detach().float() for name, value in terms.items()}
    sums |= {
        "token": ((right & answers).sum(-1) / labels).sum(),
        "exact": exact.float().sum(),
        "halted": done.sum(),
        "halted_exact": (done * exact).sum(),
        "halted_steps": (done * steps).sum(),
    }
    return SegmentResult(rows._replace(carry=end.carry, steps=steps, halted=halted), sums)


@torch.no_grad()
def continue_target(
    model: Reasoner, config: Config, examples: Examples, carry: Carry, last: Tensor
) -> Tensor:
    """Return the target of q_continue from one segment more: float32 [B]."""
    with autocast(examples.inputs.device, config.train.precision):
        after = model(examples.inputs, examples.puzzles, carry).q.float()
    return torch.where(last, after[:, 0], after.amax(-1)).sigmoid()
