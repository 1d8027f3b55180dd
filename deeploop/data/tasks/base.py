"""The contract of a task: its vocabulary, its examples, and where a model must answer.

An example is a sequence of tokens, at some of which the model must predict an answer; all other
targets are IGNORE. Most tasks are next-token sequences: the answers follow the question, and each
is predicted at the token before it. An example is a pure function of (seed, split, index,
difficulty).
"""

from abc import ABC, abstractmethod

import numpy as np

from deeploop.data.batches import IGNORE
from deeploop.data.tasks.draw import Draw

PAD = 0  # id after an example's end
Example = tuple[np.ndarray, np.ndarray]  # inputs [n, length] and answers [n, answers], int64


class Task(ABC):
    """One task. All examples of a difficulty have the same length, and answers at the same places.

    Attributes:
        symbols: text of each id; id 0 pads.
    """

    symbols: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    @abstractmethod
    def places(self, difficulty: int) -> np.ndarray:
        """Return at which tokens of an example an answer is predicted: bool [length]."""

    @abstractmethod
    def examples(self, draw: Draw, difficulty: int) -> Example:
        """Make draw.n examples: the tokens that a model reads, and the answers in their order."""

    @abstractmethod
    def choices(self, difficulty: int) -> int:
        """Return how many answers are equally likely to one who reads the format alone."""

    def length(self, difficulty: int) -> int:
        """Return the tokens that a model reads of an example."""
        return len(self.places(difficulty))

    def targets(self, difficulty: np.ndarray) -> np.ndarray:
        """Return the number of answers in examples: difficulties int64 [n] -> int64 [n]."""
        levels, place = np.unique(difficulty, return_inverse=True)
        return np.array([self.places(d).sum() for d in levels.tolist()], np.int64)[place]

    def sample(self, keys: np.ndarray, difficulty: np.ndarray, seq_len: int) -> Example:
        """Make examples and pad them: inputs and targets, each int64 [n, seq_len].

        Args:
            keys: uint64 [n], of `deeploop.data.tasks.draw.example_keys`.
            difficulty: int64 [n].
            seq_len: at least the `length` of each difficulty.
        """
        inputs = np.full((len(keys), seq_len), PAD, np.int64)
        targets = np.full((len(keys), seq_len), IGNORE, np.int64)
        for d in np.unique(difficulty).tolist():
            rows, places = np.flatnonzero(difficulty == d), np.flatnonzero(self.places(d))
            tokens, answers = self.examples(Draw(keys[rows], d), d)
            inputs[rows, : tokens.shape[1]] = tokens
            targets[rows[:, None], places] = answers
        return inputs, targets

    def ids(self, *symbols: str) -> np.ndarray:
        """Return the ids of symbols: int64 [len(symbols)]."""
        return np.array([self.symbols.index(s) for s in symbols], np.int64)

    def text(self, tokens: np.ndarray) -> str:
        """Write ids [T] as their symbols with spaces between them."""
        return " ".join(self.symbols[i] for i in tokens.tolist())


class NextTokenTask(Task):
    """A task whose answers follow the question and are read like any token of a text."""

    @abstractmethod
    def answered(self, draw: Draw, difficulty: int) -> np.ndarray:
        """Make draw.n examples with their answers: int64 [n, length + 1]."""

    def examples(self, draw: Draw, difficulty: int) -> Example:
        tokens = self.answered(draw, difficulty)
        return tokens[:, :-1], tokens[:, 1:][:, self.places(difficulty)]


def last(count: int, length: int) -> np.ndarray:
    """Return the places before the last `count` tokens of a sequence: bool [length - 1]."""
    return np.arange(1, length) >= length - count


def digits(limit: int) -> tuple[str, ...]:
    """Return the numbers below a limit as symbols."""
    return tuple(map(str, range(limit)))
