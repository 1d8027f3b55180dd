"""Compute how many answers of a generated task a model gets right, by loops and difficulty.

exact      share of the examples in which every answer is the model's most likely token
token      share of the answers that are
loss       cross-entropy, nats per answer
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deeploop.data.batches import IGNORE
from deeploop.data.tasks import Task
from deeploop.data.tasks.draw import HELD_OUT, example_keys
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.utils.device import autocast
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import InputError


class Matches:
    """Count right answers over batches, on the device until they are read."""

    def __init__(self, model: LoopLM):
        self.model = model
        device = model.embed_tokens.weight.device
        self.counts = torch.zeros(4, dtype=torch.float64, device=device)

    def __call__(self, n: Tensor, targets: Tensor) -> None:
        """Count a batch: final states [B, T, d_model], targets int64 [B, T] with IGNORE."""
        answers = targets != IGNORE
        right = self.model.logits(n[answers]).argmax(-1) == targets[answers]
        wrong = torch.zeros_like(answers).masked_scatter(answers, ~right)
        asked = answers.any(1)
        exact = asked & ~wrong.any(1)
        self.counts += torch.stack([exact.sum(), asked.sum(), right.sum(), answers.sum()])

    def shares(self, ranks: Ranks = Ranks()) -> tuple[float, float]:  # noqa: B008
        """Return the shares of exact examples and of right answers, over all ranks."""
        ranks.all_reduce_([self.counts])
        exact, asked, right, answers = self.counts.tolist()
        return exact / asked, right / answers


class Score(NamedTuple):
    """How well a model solves examples; see the top of this module."""

    exact: float
    token: float
    loss: float


@torch.no_grad()
def task_accuracy(
    model: LoopLM,
    task: Task,
    difficulty: int,
    loops: int | None = None,
    examples: int = 1024,
    seed: int = 0,
    precision: str = "fp32",
    batch: int = 64,
) -> Score:
    """Score a model on held-out examples of one difficulty.

    Args:
        loops: loops to run; None runs those of training.
        examples: number of held-out examples; none of them is ever trained on.
        seed: of the examples; with 0 they are those of a run's validation.
        precision: "bf16" or "fp32".
        batch: sequences per forward pass.

    Raises:
        InputError: an example is longer than the model's sequences, or there is none.
    """
    seq_len, most = task.length(difficulty), model.config.seq_len
    if seq_len > most:
        raise InputError(
            f"difficulty={difficulty}: its examples have {seq_len} tokens, and the model reads "
            f"{most}; give a lower one"
        )
    if examples < 1:
        raise InputError(f"examples={examples}: must be at least 1")
    matches = Matches(model)
    device, training = matches.counts.device, model.training
    keys = example_keys(seed, HELD_OUT, np.arange(examples, dtype=np.uint64))
    loss = torch.zeros((), dtype=torch.float64, device=device)
    model.eval()
    try:
        for start in range(0, examples, batch):
            some = keys[start : start + batch]
            pair = task.sample(some, np.full(len(some), difficulty), seq_len)
            tokens, targets = (torch.from_numpy(x).to(device) for x in pair)
            with autocast(device, precision):
                n = model(tokens, loops=loops)
                loss += linear_cross_entropy(n, model.head, targets)
                matches(n, targets)
    finally:
        model.train(training)
    exact, token = matches.shares()
    return Score(exact, token, float(loss) / float(matches.counts[3]))


def accuracy_by_loops(
    model: LoopLM,
    task: Task,
    difficulties: Sequence[int],
    loops: Sequence[int],
    examples: int = 256,
    seed: int = 0,
    precision: str = "fp32",
) -> dict[int, dict[int, Score]]:
    """Score a model for each difficulty and each number of loops: {difficulty: {loops: Score}}.

    The arguments and errors are those of `task_accuracy`.
    """
    return {
        d: {r: task_accuracy(model, task, d, r, examples, seed, precision) for r in loops}
        for d in difficulties
    }
