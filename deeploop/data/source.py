"""The contract of what a run trains and validates on: the tokens of a text, or a generated task."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from deeploop.data.tokenizer import Tokenizer

Pair = tuple[Tensor, Tensor]  # inputs and targets, int64 [B, T]; IGNORE is no target


class Source(ABC):
    """Sequences to train on, and others that are held out.

    Attributes:
        name: of the text or task.
        vocab_size: number of ids.
        tokenizer: None where the ids stand for no text.
        answers: whether the targets are the answers of a task, so that exact matches are counted.
    """

    name: str
    vocab_size: int
    tokenizer: Tokenizer | None
    answers = False

    @abstractmethod
    def batch(
        self, *, seed: int, step: int, global_batch: int, seq_len: int, rows: slice | range
    ) -> Pair:
        """Return rows `rows` of the batch of `step`: a pure function of its arguments."""

    def batch_targets(self, *, seed: int, step: int, global_batch: int, seq_len: int) -> int:
        """Return how many targets all rows of a batch have together."""
        return global_batch * seq_len

    @property
    @abstractmethod
    def held_out_targets(self) -> int:
        """Number of targets of all held-out sequences."""

    @abstractmethod
    def held_out(self, batch: int, seq_len: int, targets: int) -> Iterator[Pair]:
        """Yield the sequences with the first `targets` held-out targets, `batch` at a time.

        The same ones whatever the batch. Where `targets` ends inside a sequence, its other targets
        are IGNORE.
        """

    @abstractmethod
    def held_out_sequences(self, seq_len: int) -> int:
        """Return how many sequences `draw_held_out` has to choose from; 0: no whole one."""

    @abstractmethod
    def draw_held_out(self, seed: int, count: int, seq_len: int) -> Pair:
        """Draw `count` whole held-out sequences, none twice, by the seed alone."""

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes per held-out token; None where tokens stand for no text."""
        return None

    def first_bytes_per_token(self, tokens: int) -> float | None:
        """Return the UTF-8 bytes per token of the first `tokens` held-out tokens; None as above."""
        return None

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return facts that differ where two sources differ, as JSON: a resumed run compares them.

        They go to corpus.json of a run.
        """

    @abstractmethod
    def floors(self) -> dict[str, float]:
        """Return by name the nats per held-out target that simple guesses reach."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line for the start of a log."""
