"""Measure training speed in tokens per second."""

import contextlib
import time
from collections.abc import Iterator

WARMUP_STEPS = 10  # left out of the overall rate: allocation, caches, compilation


class Throughput:
    """Measure tokens per second, without the time spent validating and saving.

    Counting a step does not wait for the device. Ask for a rate only after something
    has waited for it, such as reading the loss.
    """

    def __init__(self, tokens: int):
        self.tokens = tokens  # of one step, over all ranks
        self.steps = 0
        self.start()

    def start(self) -> None:
        """Start the clock."""
        self.warm_time = self.last_time = time.perf_counter()
        self.last_steps = 0  # counted at `last_time`, the last call of `rate`

    def count(self) -> None:
        """Count one step."""
        self.steps += 1
        if self.steps == WARMUP_STEPS:
            self.warm_time = time.perf_counter()

    def rate(self) -> float:
        """Return tokens per second since the last call."""
        now = time.perf_counter()
        rate = (self.steps - self.last_steps) * self.tokens / (now - self.last_time)
        self.last_time, self.last_steps = now, self.steps
        return rate

    def overall(self) -> float | None:
        """Return tokens per second from the warm-up steps to `stop`; None if no step came after."""
        counted = self.steps - WARMUP_STEPS
        return counted * self.tokens / (self.end - self.warm_time) if counted > 0 else None

    def stop(self) -> None:
        """Stop the clock."""
        self.end = time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time of the block inside out of every rate."""
        before = time.perf_counter()
        yield
        spent = time.perf_counter() - before
        self.warm_time += spent
        self.last_time += spent
