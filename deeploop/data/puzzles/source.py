"""Train and validate on the two splits of a puzzle data set."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from deeploop.data.batches import IGNORE
from deeploop.data.puzzles.generated import SETS, generated_set
from deeploop.data.puzzles.puzzle_set import Examples, PuzzleSet, open_both
from deeploop.data.source import Pair, Source
from deeploop.utils.errors import InputError

SAMPLED = 4096  # held-out examples whose labels are counted


class PuzzleSource(Source):
    """Examples of the train split to train on, and of the test split to validate on.

    Every cell of a held-out example counts as a held-out target, whether it has a label or not.
    """

    tokenizer = None
    answers = True

    def __init__(self, train: PuzzleSet, test: PuzzleSet):
        self.train, self.test = train, test
        self.name, self.vocab_size = train.path.name, train.vocab_size
        self.seq_len, self.puzzles = train.seq_len, train.identifiers

    def examples(self, *, seed: int, step: int, global_batch: int, rows: slice | range) -> Examples:
        """Return rows `rows` of the batch of `step`: a pure function of its arguments."""
        return self.train.batch(seed=seed, step=step, global_batch=global_batch, rows=rows)

    def batch(
        self, *, seed: int, step: int, global_batch: int, seq_len: int, rows: slice | range
    ) -> Pair:
        some = self.examples(seed=seed, step=step, global_batch=global_batch, rows=rows)
        return some.inputs, some.targets

    @property
    def held_out_targets(self) -> int:
        return self.test.examples_count * self.seq_len

    def held_out_examples(self, batch: int, targets: int) -> Iterator[Examples]:
        """Yield the drawn held-out examples that have `targets` cells, `batch` at a time.

        The same ones for every batch and every seed of a run.
        """
        rows = self.test.draw(0, -(-targets // self.seq_len))
        return self.test.held_out(batch, rows)

    def held_out(self, batch: int, seq_len: int, targets: int) -> Iterator[Pair]:
        for some in self.held_out_examples(batch, targets):
            yield some.inputs, some.targets

    def held_out_sequences(self, seq_len: int) -> int:
        return self.test.examples_count

    def draw_held_out(self, seed: int, count: int, seq_len: int) -> Pair:
        drawn = self.test.read(self.test.draw(seed, count))
        return drawn.inputs, drawn.targets

    def identity(self) -> dict[str, Any]:
        """Return facts of both splits that a resumed run compares."""
        train, test = self.train.identity(), self.test.identity()
        content = [*train.pop("content"), *test.pop("content")]
        return {"puzzle_train": train, "puzzle_test": test, "content": content}

    def floors(self) -> dict[str, float]:
        """Return the nats per label of one who knows how frequent each label is."""
        drawn = self.test.read(self.test.draw(0, SAMPLED))
        labels = drawn.targets[drawn.targets != IGNORE].numpy()
        _, counts = np.unique(labels, return_counts=True)
        shares = counts / counts.sum()
        return {"counts of labels": -sum(p * math.log(p) for p in shares.tolist())}

    def describe(self) -> str:
        return f"{self.train.describe()}; {self.test.examples_count:,} held out"


def open_source(path: str) -> PuzzleSource:
    """Open a puzzle data set's folder, or a generated set by its name.

    Raises InputError where there is none, or a split has no examples.
    """
    train, test = open_both(generated_set(path) if path in SETS else path)
    for split in (train, test):
        if not split.examples_count:
            raise InputError(f"data.puzzles={path!r}: its {split.split} split has no examples")
    return PuzzleSource(train, test)
