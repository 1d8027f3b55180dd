"""Timing on a machine whose speed drifts: contenders take turns in one run."""

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from deeploop.utils.device import computes_in_bf16

FLUSH_BYTES = 256 << 20  # several times any L2


class Budget:
    """Count down the seconds that may still be spent on something."""

    def __init__(self, seconds: float):
        self.left = seconds

    @contextlib.contextmanager
    def spend(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.left -= time.monotonic() - begin


def not_compiling(device: torch.device, budget: Budget) -> str | None:
    """Name the reason to leave torch.compile out; None if it takes part."""
    if device.type == "cpu" and os.environ.get("DEEPLOOP_BENCH_COMPILE") != "1":
        return "on a CPU only with DEEPLOOP_BENCH_COMPILE=1"
    if device.type == "cpu" and shutil.which("g++") is None:
        return "on a CPU it needs a C++ compiler, and g++ is not found"
    return "the seconds for compiling are spent" if budget.left <= 0 else None


def in_words(error: Exception) -> str:
    """Format an exception as its type and the first line of its text."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 15, warmup: int = 3
) -> dict[str, list[float]]:
    """Time each contender's rounds in seconds of wall clock, in turns: A B A B ...

    Every call waits for the device.
    """

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
    """Time each contender's rounds in seconds between CUDA events, in turns: A B A B ...

    L2 is flushed before each call. The flush keeps the device busy while the host queues the
    call, so a call that is queued at once (a graph replay) is timed without its launch.
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
    """Capture a CUDA graph of one call, on the stream that warmed it up.

    A capture that fails can break the next one in the same process. So a call that waits for
    the device, which no graph can hold, is refused before the capture (RuntimeError).
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
    """Measure GB/s of copying one big tensor, bytes read plus bytes written.

    It is the ceiling of a kernel that only moves memory on this device.
    """
    n_bytes = (1 << 30) if device.type == "cuda" else (128 << 20)
    source = torch.randn(n_bytes // 2, device=device, dtype=torch.float32).to(torch.bfloat16)
    target = torch.empty_like(source)
    timed = interleaved_on_device if device.type == "cuda" else interleaved
    seconds = timed({"copy": lambda: target.copy_(source)}, rounds=10)["copy"]
    return 2 * n_bytes / statistics.median(seconds) / 1e9


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Measure TFLOP/s of one large square matrix product under PyTorch's present settings.

    It is the ceiling of code whose work is matrix products on this device.
    """
    n = 8192 if device.type == "cuda" else 2048
    if dtype is torch.bfloat16 and not computes_in_bf16(device):
        n = 256  # emulated: a product of 2048 takes a minute
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    timed = interleaved_on_device if device.type == "cuda" else interleaved
    seconds = timed({"matmul": lambda: torch.mm(a, b, out=out)}, rounds=7, warmup=1)["matmul"]
    return 2 * n**3 / statistics.median(seconds) / 1e12


def measured(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    warmup: int = 1,
    replays: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Time the contenders in turns.

    Args:
        replays: called in the place of `calls` between CUDA events, by contender.

    Returns:
        By contender: `seconds`, the median of one call, on CUDA between two events with L2
        flushed before; `spread`, the middle half of the rounds over that median;
        `call_seconds`, wall clock until the device is done (on a CPU the same).
    """
    wall = interleaved(calls, rounds, warmup)
    times = wall
    if device.type == "cuda":
        times = interleaved_on_device(replays or calls, rounds, warmup)
    return {
        name: {
            "seconds": statistics.median(seconds),
            "spread": middle_half(seconds),
            "call_seconds": statistics.median(wall[name]),
        }
        for name, seconds in times.items()
    }


def peak_of(run: Callable[[], object], existing: Iterable[Tensor] = ()) -> int:
    """Measure the peak of a call's memory, in bytes beyond those allocated before it.

    On a CPU storages are counted (`LiveBytes` of `deeploop.analyze.plan.memory`); `existing` are
    then the tensors allocated before that the call may touch.
    """
    if not torch.cuda.is_available():
        from deeploop.analyze.plan.memory import LiveBytes  # needs the trainer's packages

        with LiveBytes() as live:
            for tensor in existing:
                live.add(tensor)
            before = live.now
            run()
        return live.peak - before
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernel_times(run: Callable[[], object]) -> list[tuple[str, float]]:
    """List name and seconds of the CUDA kernels that one call launches, in order."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        run()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.elapsed_us() / 1e6)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
    ]


def middle_half(seconds: list[float]) -> float:
    """Divide the range of the middle half of the times by their median."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Compute |actual - expected| / |expected| over the whole tensor; NaN stays NaN."""
    actual, expected = actual.double(), expected.double()
    scale = expected.norm().clamp_min(1e-30)
    return ((actual - expected).norm() / scale).item()
