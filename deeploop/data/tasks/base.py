"""The contract of a task: its vocabulary, its examples, and which tokens are answers.

An example is a question and its answers as one sequence of tokens. The answers are the targets,
next-token style: the model reads a token and predicts the one that follows. All other targets
are IGNORE. An example is a pure function of (seed, split, index, difficulty).
"""

from abc import ABC, abstractmethod

import numpy as np

from deeploop.data.batches import IGNORE
from deeploop.data.tasks.draw import Draw

PAD = 0  # id after an example's end


class Task(ABC):
    """One task: `tokens` makes examples of a difficulty, `answers` says which tokens answer.

    All examples of one difficulty have the same length and answers at the same places.

    Attributes:
        symbols: text of each id; id 0 pads.
    """

    symbols: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        return len(self.symbols)

    @abstractmethod
    def answers(self, difficulty: int) -> np.ndarray:
        """Return which tokens of an example are answers: bool [length]; the first never is."""

    @abstractmethod
    def tokens(self, draw: Draw, difficulty: int) -> np.ndarray:
        """Make draw.n examples: ids, int64 [n, length]."""

    @abstractmethod
    def choices(self, difficulty: int) -> int:
        """Return how many answers are equally likely to one who reads the format alone."""

    def seq_len(self, difficulty: int) -> int:
        """Return the tokens that a model reads of an example: all but the last."""
        return len(self.answers(difficulty)) - 1

    def targets(self, difficulty: np.ndarray) -> np.ndarray:
        """Return the number of answer tokens of examples: int64 [n] -> int64 [n]."""
        levels, place = np.unique(difficulty, return_inverse=True)
        return np.array([self.answers(int(d)).sum() for d in levels], np.int64)[place]

    def sample(
        self, keys: np.ndarray, difficulty: np.ndarray, seq_len: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Make examples and pad them: (inputs, targets), int64 [n, seq_len].

        Args:
            keys: uint64 [n], of `deeploop.data.tasks.draw.example_keys`.
            difficulty: int64 [n].
            seq_len: at least `seq_len(d)` of each difficulty d.
        """
        inputs = np.full((len(keys), seq_len), PAD, np.int64)
        targets = np.full((len(keys), seq_len), IGNORE, np.int64)
        for d in np.unique(difficulty).tolist():
            rows = np.flatnonzero(difficulty == d)
            tokens, answers = self.tokens(Draw(keys[rows], d), d), self.answers(d)
            length = len(answers) - 1
            inputs[rows, :length] = tokens[:, :-1]
            targets[rows, :length] = np.where(answers[1:], tokens[:, 1:], IGNORE)
        return inputs, targets

    def ids(self, *symbols: str) -> np.ndarray:
        """Return the ids of symbols: int64 [len(symbols)]."""
        return np.array([self.symbols.index(s) for s in symbols], np.int64)

    def text(self, tokens: np.ndarray) -> str:
        """Write ids [T] as their symbols with spaces between them."""
        return " ".join(self.symbols[i] for i in tokens.tolist())


def answers_at_end(length: int, count: int) -> np.ndarray:
    """Return the mask of a sequence whose last `count` tokens are answers: bool [length]."""
    return np.arange(length) >= length - count


def digits(numbers: range) -> tuple[str, ...]:
    """Return numbers as symbols."""
    return tuple(map(str, numbers))
