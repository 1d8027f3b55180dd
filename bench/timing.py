"""Timing that holds on a machine whose speed drifts: contenders take turns in one run."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

FLUSH_BYTES = 256 << 20  # several times any L2


class Budget:
    """Seconds that may still be spent on something."""

    def __init__(self, seconds: float):
        self.left = seconds

    @contextlib.contextmanager
    def spend(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.left -= time.monotonic() - begin


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 15, warmup: int = 3
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


def interleaved_on_device(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 30, warmup: int = 3
) -> dict[str, list[float]]:
    """Seconds between CUDA events around each call, A B A B ..., L2 flushed before each.

    The flush keeps the device busy while the host queues the call, so a call that
    is queued at once (a graph replay) is timed without its launch.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def once(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        run()
        end.record()
        return begin, end

    for _ in range(warmup):
        for run in contenders.values():
            once(run)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {
        name: [] for name in contenders
    }
    for _ in range(rounds):
        for name, run in contenders.items():
            events[name].append(once(run))
        torch.cuda.synchronize()
    return {
        name: [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        for name, pairs in events.items()
    }


def graphed(run: Callable[[], object], stream: torch.cuda.Stream) -> Callable[[], None]:
    """A CUDA graph of one call, captured on the stream it was warmed up on.

    A capture that fails can leave the process unfit for the next one, so a call that
    waits for the device, as no graph can, is refused before (RuntimeError).
    """
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
        stream.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of one big tensor copied into another, bytes read plus bytes written.

    What a kernel that only moves memory can hope for on this device.
    """
    n_bytes = (1 << 30) if device.type == "cuda" else (128 << 20)
    source = torch.randn(n_bytes // 2, device=device, dtype=torch.float32).to(torch.bfloat16)
    target = torch.empty_like(source)
    timed = interleaved_on_device if device.type == "cuda" else interleaved
    seconds = timed({"copy": lambda: target.copy_(source)}, rounds=10)["copy"]
    return 2 * n_bytes / statistics.median(seconds) / 1e9


def peak_of(run: Callable[[], object]) -> int:
    """Bytes a call holds at most on the current CUDA device beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernel_names(run: Callable[[], object]) -> list[str]:
    """Names of the CUDA kernels one call launches, in order."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    ]


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> float:
    """Median time of `slow` over median time of `fast`: how much faster `fast` is."""
    return statistics.median(times[slow]) / statistics.median(times[fast])


def spread(seconds: list[float]) -> float:
    """The middle half of the times over their median: how much a median is worth."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| over the whole tensor; NaN stays NaN."""
    actual, expected = actual.double(), expected.double()
    scale = expected.norm().clamp_min(1e-30)
    return ((actual - expected).norm() / scale).item()
