"""Timing that holds on a machine whose speed drifts: contenders take turns in one run."""

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

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


def not_compiling(device: torch.device, budget: Budget) -> str | None:
    """Why torch.compile is no contender here and now; None where it is."""
    if device.type == "cpu" and os.environ.get("DEEPLOOP_BENCH_COMPILE") != "1":
        return "on a CPU only with DEEPLOOP_BENCH_COMPILE=1"
    if device.type == "cpu" and shutil.which("g++") is None:
        return "on a CPU it needs a C++ compiler, and g++ is not found"
    return "the seconds for building it are over" if budget.left <= 0 else None


def in_words(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


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


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of one large square matrix product in a dtype, as PyTorch is set up here.

    What code whose work is matrix products can hope for on this device.
    """
    n = 8192 if device.type == "cuda" else 2048
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
    """Contenders against each other, in turns: what a record says of each one's time.

    seconds: median of one call; on CUDA between two events, L2 flushed before; spread: the
    middle half over it; call_seconds: wall clock, device waited for (on a CPU the same).
    `replays` stand in for the calls between two events.
    """
    wall = interleaved(calls, rounds, warmup)
    times = wall
    if device.type == "cuda":
        times = interleaved_on_device(replays or calls, rounds, warmup)
    return {
        name: {
            "seconds": statistics.median(seconds),
            "spread": spread(seconds),
            "call_seconds": statistics.median(wall[name]),
        }
        for name, seconds in times.items()
    }


def peak_of(run: Callable[[], object], held: Iterable[Tensor] = ()) -> int:
    """Bytes a call holds at most beyond what was there before.

    On a CPU they are counted, by storages (`deeploop.analyze.plan.memory.Live`); `held` are then those
    tensors from before that the call may look at.
    """
    if not torch.cuda.is_available():
        from deeploop.analyze.plan.memory import Live  # needs the trainer's packages

        with Live() as live:
            for tensor in held:
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
    """Name and seconds of the CUDA kernels one call launches, in order."""
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


def spread(seconds: list[float]) -> float:
    """The middle half of the times over their median: how much a median is worth."""
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| over the whole tensor; NaN stays NaN."""
    actual, expected = actual.double(), expected.double()
    scale = expected.norm().clamp_min(1e-30)
    return ((actual - expected).norm() / scale).item()
