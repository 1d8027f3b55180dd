"""One split of a puzzle data set: its examples, by number or in the order of training."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deeploop.data.batches import IGNORE, permute
from deeploop.data.puzzles.folder import (
    IDENTIFIERS,
    METADATA,
    SPLITS,
    TEST_PUZZLES,
    Arrays,
    Metadata,
    read_identifiers,
    read_metadata,
    read_split,
    read_test_puzzles,
)
from deeploop.data.puzzles.order import Order
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError

SAMPLED = 256  # examples of a split that `identity` hashes


class Examples(NamedTuple):
    """Examples of puzzles, int64: a target of IGNORE is none."""

    inputs: Tensor  # [n, seq_len]
    targets: Tensor  # [n, seq_len]
    puzzles: Tensor  # [n], identifiers of the puzzles, for embeddings


class PuzzleSet:
    """One split of a folder that HRM, TRM or `deeploop data` wrote.

    Attributes:
        path, split, meta: the folder, "train" or "test", and what the split's dataset.json says.
        arrays: of the split, with inputs and labels on disk.
        order: of training.
    """

    def __init__(self, path: Path, split: str, meta: Metadata, arrays: Arrays):
        self.path, self.split, self.meta, self.arrays = path, split, meta, arrays
        self.order = Order(arrays.puzzle_offsets, arrays.group_offsets)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.meta.vocab_size

    @property
    def seq_len(self) -> int:
        """Tokens of an example."""
        return self.meta.seq_len

    @property
    def identifiers(self) -> int:
        """Number of puzzle identifiers of both splits, with the blank one."""
        return self.meta.num_puzzle_identifiers

    @property
    def examples_count(self) -> int:
        """Number of examples, with all augmentations."""
        return len(self.arrays.inputs)

    @property
    def puzzles_count(self) -> int:
        """Number of puzzles, with all augmentations."""
        return len(self.arrays.puzzle_identifiers)

    @property
    def groups_count(self) -> int:
        """Number of original puzzles."""
        return len(self.arrays.group_offsets) - 1

    @property
    def epoch_examples(self) -> int:
        """Number of examples of one epoch: those of one puzzle of each group."""
        return self.order.epoch_examples

    def examples(self, seed: int, indices: np.ndarray) -> Examples:
        """Return examples of the training stream: a pure function of the seed and of each index.

        The stream is one epoch of `epoch_examples` after another (`deeploop.data.puzzles.order`).

        Args:
            seed: of the training order.
            indices: int64 [n], places in the stream from 0, in any order.

        Raises:
            InputError: an id of an example is outside of the vocabulary.
        """
        picked = self.order.pick(seed, indices)
        return self._gather(picked.examples, picked.puzzles)

    def batch(self, *, seed: int, step: int, global_batch: int, rows: slice | range) -> Examples:
        """Return rows `rows` of the batch of `step`: a pure function of its arguments.

        Row b of step s is example s * global_batch + b of the stream, on every rank.
        """
        picked = np.arange(global_batch, dtype=np.int64)[rows]
        return self.examples(seed, step * global_batch + picked)

    def read(self, rows: np.ndarray) -> Examples:
        """Return examples by their rows in the files, int64 [n]; raises InputError as `examples`.

        Equal rows are equal examples, whatever the seed.
        """
        puzzles = np.searchsorted(self.arrays.puzzle_offsets, rows, side="right") - 1
        return self._gather(rows, puzzles)

    def held_out(self, batch: int, rows: np.ndarray | None = None) -> Iterator[Examples]:
        """Yield examples in order, `batch` at a time; the last batch has fewer, and is not padded.

        Args:
            batch: most examples of one batch.
            rows: int64 [n], those to yield in the place of all.
        """
        rows = np.arange(self.examples_count) if rows is None else rows
        for start in range(0, len(rows), batch):
            yield self.read(rows[start : start + batch])

    def draw(self, seed: int, count: int) -> np.ndarray:
        """Draw `count` rows, none twice, by the seed alone; all where there are fewer.

        Returns int64 [<= count] in rising order.
        """
        most = self.examples_count
        place = np.arange(min(count, most), dtype=np.uint64)
        rows = permute(place, most, np.full(len(place), seed % (1 << 64), np.uint64))
        return np.sort(rows.astype(np.int64))

    def names(self) -> list[str]:
        """Read the name of each puzzle identifier; raises InputError without identifiers.json."""
        return read_identifiers(self.path / IDENTIFIERS, self.identifiers)

    def test_puzzles(self) -> dict[str, Any]:
        """Read ARC's test tasks by name; raises InputError where the set has none (HRM's)."""
        return read_test_puzzles(self.path / TEST_PUZZLES)

    def identity(self) -> dict[str, Any]:
        """Return facts that differ where two sets differ, as JSON: a resumed run compares them."""
        digest = hashlib.sha256()
        rows = self.draw(0, SAMPLED)
        offsets = self.arrays.puzzle_offsets, self.arrays.group_offsets
        sampled = self.arrays.inputs[rows], self.arrays.labels[rows]
        for array in (self.arrays.puzzle_identifiers, *offsets, *sampled):
            digest.update(array.astype("<i8").tobytes())
        return {
            "puzzles": [self.groups_count, self.puzzles_count, self.examples_count],
            "vocab_size": self.vocab_size,
            "identifiers": self.identifiers,
            "content": [digest.hexdigest()],
        }

    def describe(self) -> str:
        """Return one line for the start of a log."""
        return (
            f"{self.split} of {self.path.name}: {self.groups_count:,} puzzles, "
            f"{self.puzzles_count:,} with augmentations, {self.examples_count:,} examples of "
            f"{self.seq_len} tokens, vocabulary {self.vocab_size}"
        )

    def _gather(self, rows: np.ndarray, puzzles: np.ndarray) -> Examples:
        ignored = self.meta.ignore_label_id
        inputs = self._ids("inputs", self.arrays.inputs, rows)
        targets = self._ids("labels", self.arrays.labels, rows)
        if ignored is not None:
            targets[targets == ignored] = IGNORE
        identifiers = self.arrays.puzzle_identifiers[puzzles]
        return Examples(*map(torch.from_numpy, (inputs, targets, identifiers)))

    def _ids(self, name: str, array: np.ndarray, rows: np.ndarray) -> np.ndarray:
        ids = array[rows].astype(np.int64)
        allowed = (ids >= 0) & (ids < self.vocab_size)
        if name == "labels" and self.meta.ignore_label_id is not None:
            allowed |= ids == self.meta.ignore_label_id
        if not allowed.all():
            row, place = np.argwhere(~allowed)[0].tolist()
            raise InputError(
                f"{self.path / self.split}: {name} of example {int(rows[row])} has the id "
                f"{int(ids[row, place])}, outside of its vocabulary of {self.vocab_size}; write "
                "the set again"
            )
        return ids


def open_puzzles(path: str | Path, split: str) -> PuzzleSet:
    """Open a split, "train" or "test", of a data set's folder.

    Inputs and labels may be uint8, int32 or int64, and stay on disk.

    Raises:
        InputError: the folder is none of a data set, or a file of it is absent or damaged.
    """
    folder = user_path(str(path), "puzzle folder")
    if split not in SPLITS:
        raise InputError(f"split={split!r}: must be one of {', '.join(SPLITS)}")
    if not (folder / split / METADATA).exists():
        raise InputError(
            f"puzzle folder {str(path)!r}: has no {split}/{METADATA}; give a folder of HRM, TRM or "
            "'deeploop data'"
        )
    meta = read_metadata(folder / split / METADATA)
    return PuzzleSet(folder, split, meta, read_split(folder / split, meta))


def open_both(path: str | Path) -> tuple[PuzzleSet, PuzzleSet]:
    """Open the train and the test split of a folder; raises InputError where they do not match."""
    train, test = (open_puzzles(path, split) for split in SPLITS)
    for name in ("vocab_size", "seq_len", "num_puzzle_identifiers", "pad_id"):
        ours, theirs = getattr(train.meta, name), getattr(test.meta, name)
        if ours != theirs:
            raise InputError(
                f"puzzle folder {str(path)!r}: {name} is {ours} in train and {theirs} in test; "
                "give a set whose splits agree"
            )
    return train, test
