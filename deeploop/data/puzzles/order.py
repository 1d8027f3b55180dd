"""The order of training examples, as a stream without an end: the n-th example for any n.

The stream is one epoch after another. An epoch is a shuffled pass over the groups; a group is one
original puzzle with its augmentations. Each group gives the examples of one drawn puzzle of it, in
a drawn order. There is no generator and no state: the n-th example is a hash of (seed, n), so ranks
and a resumed run agree.

HRM (arXiv 2506.21734) and TRM (arXiv 2510.04871) draw so, too, but their code drops what is left of
a puzzle that a batch's end cuts, and the last short batch of an epoch; here both open the next
batch. In the sets that they build all puzzles of a group have as many examples. Where they have
not, each gives as many as the smallest, so that epochs have one length.
"""

from typing import NamedTuple

import numpy as np

from deeploop.data.batches import mix, permute

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
KEPT = 4  # epochs whose order of groups is remembered: a batch of a small set has several


class Picked(NamedTuple):
    """Rows of a data set: int64 [n] each."""

    examples: np.ndarray
    puzzles: np.ndarray


class Order:
    """The training order of one set.

    Args:
        puzzle_offsets: int64 [puzzles + 1], the examples of each puzzle.
        group_offsets: int64 [groups + 1], the puzzles of each group.
    """

    def __init__(self, puzzle_offsets: np.ndarray, group_offsets: np.ndarray):
        self.puzzle_offsets, self.group_offsets = puzzle_offsets, group_offsets
        self.sizes = np.minimum.reduceat(np.diff(puzzle_offsets), group_offsets[:-1])
        self.epoch_examples = int(self.sizes.sum())
        self._epochs: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def pick(self, seed: int, index: np.ndarray) -> Picked:
        """Return which example is the n-th of the stream: a pure function of seed and n.

        Args:
            seed: of the training order.
            index: int64 [n], from 0, in any order.
        """
        epochs, within = np.divmod(index, self.epoch_examples)
        examples, puzzles = np.empty_like(index), np.empty_like(index)
        for epoch in np.unique(epochs).tolist():
            rows = np.flatnonzero(epochs == epoch)
            examples[rows], puzzles[rows] = self._pick_in(seed, epoch, within[rows])
        return Picked(examples, puzzles)

    def _pick_in(self, seed: int, epoch: int, within: np.ndarray) -> Picked:
        groups, ends = self._groups(seed, epoch)
        place = np.searchsorted(ends, within, side="right")
        group = groups[place]
        turn = within - (ends[place] - self.sizes[group])  # of this example in its group
        key = mix(_epoch_key(seed, epoch) ^ mix(group.astype(np.uint64) + _GOLDEN))
        first = self.group_offsets[group]
        puzzles = first + _below(key, self.group_offsets[group + 1] - first)
        start = self.puzzle_offsets[puzzles]
        counts = self.puzzle_offsets[puzzles + 1] - start
        examples = np.empty_like(start)
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            shuffled = permute(turn[rows].astype(np.uint64), count, mix(key[rows] ^ _GOLDEN))
            examples[rows] = start[rows] + shuffled.astype(np.int64)
        return Picked(examples, puzzles)

    def _groups(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the groups of an epoch in their order, and each one's end in its examples."""
        if (seed, epoch) not in self._epochs:
            if len(self._epochs) == KEPT:
                self._epochs.pop(next(iter(self._epochs)))
            count = len(self.sizes)
            place = np.arange(count, dtype=np.uint64)
            key = np.full(count, _epoch_key(seed, epoch))
            groups = permute(place, count, key).astype(np.int64)
            self._epochs[seed, epoch] = groups, np.cumsum(self.sizes[groups])
        return self._epochs[seed, epoch]


def _epoch_key(seed: int, epoch: int) -> np.uint64:
    start = mix(np.array([seed % (1 << 64)], np.uint64) + _GOLDEN)
    return np.uint64(mix(start ^ np.uint64(epoch))[0])


def _below(key: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Return numbers in [0, limit) by hashes: uint64 [n], int64 [n] -> int64 [n]."""
    return (mix(key + _GOLDEN) % limit.astype(np.uint64)).astype(np.int64)
