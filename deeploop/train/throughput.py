"""Measure training speed in tokens per second."""

import contextlib
import time
from collections.abc import Iterator

WARM = 10  # first steps left out of the overall speed: allocation, caches, compilation


class Speed:
    """Tokens per second, without the time spent validating and saving.

    Counting a step does not wait for the device; asking for a rate is only
    meaningful after something did (reading the loss).
    """

    def __init__(self, tokens: int):
        self.tokens = tokens  # a step
        self.steps = 0
        self.start()

    def start(self) -> None:
        self.began = self.mark = time.perf_counter()
        self.marked = 0

    def count(self) -> None:
        self.steps += 1
        if self.steps == WARM:
            self.began = time.perf_counter()

    def rate(self) -> float:
        """Since the last call."""
        now = time.perf_counter()
        rate = (self.steps - self.marked) * self.tokens / (now - self.mark)
        self.mark, self.marked = now, self.steps
        return rate

    def overall(self) -> float | None:
        """Since the warm-up steps; None where there were no more than those."""
        counted = self.steps - WARM
        return counted * self.tokens / (self.end - self.began) if counted > 0 else None

    def stop(self) -> None:
        self.end = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        spent = time.perf_counter() - before
        self.began += spent
        self.mark += spent
