"""Train and validate on a task: batches of examples in the place of a text's windows."""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from deeploop.config import DataConfig
from deeploop.data.batches import IGNORE, mix, permute
from deeploop.data.source import Pair, Source
from deeploop.data.tasks import load_task
from deeploop.data.tasks.base import Task
from deeploop.data.tasks.draw import HELD_OUT, TRAIN, example_keys
from deeploop.utils.errors import InputError

HELD_OUT_EXAMPLES = 1024
COMPARED = 64  # examples that a resumed run compares with those of its beginning


class TaskCorpus(Source):
    """Examples of a task: easy ones to train on, and held-out ones that may be harder.

    The example in row b of step s is number s * global_batch + b; its key draws its difficulty from
    `easy`. Held-out examples are the same for every seed; their difficulties take turns in `hard`.
    """

    tokenizer = None
    answers = True

    def __init__(self, name: str, task: Task, easy: range, hard: range):
        self.name, self.task, self.easy, self.hard = name, task, easy, hard
        self.vocab_size = task.vocab_size

    def batch(
        self, *, seed: int, step: int, global_batch: int, seq_len: int, rows: slice | range
    ) -> Pair:
        keys, difficulty = self._train(seed, step, global_batch)
        picked = np.arange(global_batch)[rows] if isinstance(rows, slice) else np.array(rows, int)
        return _tensors(*self.task.sample(keys[picked], difficulty[picked], seq_len))

    def batch_targets(self, *, seed: int, step: int, global_batch: int, seq_len: int) -> int:
        return int(self.task.targets(self._train(seed, step, global_batch)[1]).sum())

    def _train(self, seed: int, step: int, global_batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and difficulties of a batch."""
        index = np.arange(global_batch, dtype=np.uint64) + np.uint64(step * global_batch)
        keys = example_keys(seed, TRAIN, index)
        drawn = mix(keys + np.uint64(1)) % np.uint64(len(self.easy))
        return keys, self.easy.start + drawn.astype(np.int64)

    @property
    def held_out_targets(self) -> int:
        return int(self.task.targets(self._held_out()[1]).sum())

    def held_out(self, batch: int, seq_len: int, targets: int) -> Iterator[Pair]:
        keys, difficulty = self._held_out()
        after = np.cumsum(self.task.targets(difficulty))
        count = min(len(keys), 1 + int(np.searchsorted(after, targets)))
        for start in range(0, count, batch):
            rows = slice(start, min(start + batch, count))
            inputs, answers = self.task.sample(keys[rows], difficulty[rows], seq_len)
            surplus = int(after[rows][-1]) - targets
            if surplus > 0:
                answers.ravel()[np.flatnonzero(answers != IGNORE)[-surplus:]] = IGNORE
            yield _tensors(inputs, answers)

    def _held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys and difficulties of all held-out examples."""
        index = np.arange(HELD_OUT_EXAMPLES, dtype=np.uint64)
        return example_keys(0, HELD_OUT, index), np.resize(self.hard, HELD_OUT_EXAMPLES)

    def held_out_sequences(self, seq_len: int) -> int:
        return HELD_OUT_EXAMPLES

    def draw_held_out(self, seed: int, count: int, seq_len: int) -> Pair:
        keys, difficulty = self._held_out()
        place = np.arange(count, dtype=np.uint64)
        rows = permute(place, HELD_OUT_EXAMPLES, np.full(count, seed % (1 << 64), np.uint64))
        return _tensors(*self.task.sample(keys[rows], difficulty[rows], seq_len))

    def identity(self) -> dict[str, Any]:
        """Return the task, its difficulties in training, and a hash of some of its examples."""
        length = max(map(self.task.length, self.easy))
        compared = self.batch(
            seed=0, step=0, global_batch=COMPARED, seq_len=length, rows=slice(None)
        )
        digest = hashlib.sha256(b"".join(x.numpy().tobytes() for x in compared)).hexdigest()
        return {"task": self.name, "difficulty": _words(self.easy), "content": [digest]}

    def floors(self) -> dict[str, float]:
        difficulty = self._held_out()[1]
        nats = [math.log(self.task.choices(d)) for d in difficulty.tolist()]
        return {"guessing": float(np.average(nats, weights=self.task.targets(difficulty)))}

    def describe(self) -> str:
        return (
            f"task {self.name}: difficulty {_words(self.easy)} in training, {_words(self.hard)} in "
            f"{HELD_OUT_EXAMPLES:,} held-out examples, vocabulary {self.vocab_size}"
        )


def open_task(data: DataConfig, seq_len: int) -> TaskCorpus:
    """Open the task that a configuration names.

    Raises InputError where an example of one of its difficulties is longer than a sequence.
    """
    task, levels = load_task(data.task), (data.train_difficulties, data.eval_difficulties)
    longest = max((d for level in levels for d in level), key=task.length)
    if task.length(longest) > seq_len:
        raise InputError(
            f"model.seq_len={seq_len}: an example of data.task={data.task} of difficulty {longest} "
            f"has {task.length(longest)} tokens; give at least that, or another difficulty"
        )
    return TaskCorpus(data.task, task, *levels)


def _tensors(inputs: np.ndarray, targets: np.ndarray) -> Pair:
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def _words(levels: range) -> str:
    first, last = levels.start, levels.stop - 1
    return str(first) if first == last else f"{first}-{last}"
