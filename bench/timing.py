"""Timing that holds on a machine whose speed drifts: contenders take turns in one run."""

import statistics
import time
from collections.abc import Callable

import torch


def interleaved(
    contenders: dict[str, Callable[[], object]], rounds: int = 15, warmup: int = 3
) -> dict[str, list[float]]:
    """Seconds of each contender's rounds, A B A B ...; the device is waited for."""

    def once(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    for _ in range(warmup):
        for run in contenders.values():
            once(run)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(once(run))
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> float:
    """Median time of `slow` over median time of `fast`: how much faster `fast` is."""
    return statistics.median(times[slow]) / statistics.median(times[fast])
