"""Records: what every case of the bench writes down, whatever it timed.

A record is one case: where it ran (device, clocks, versions, commit), the device's measured
ceilings, and its contenders by name. An entry of a contender has

    seconds, spread, call_seconds   see `bench.harness.timing.measured`
    kernel_seconds  sum over the CUDA kernels of one call; None on a CPU
    bytes           bytes that its operators move; None where they cannot be seen
    peak_bytes      peak memory of one call beyond what was allocated before it
    floor_bytes, flops, tokens      its `Work`
    gb_per_s        floor_bytes over seconds; of_copy: over the measured copy bandwidth
    tflop_per_s     flops over seconds; of_matmul: over the measured matrix product
    of_floor        shortest time that both ceilings allow, over seconds
    tokens_per_s    tokens over seconds

`ours` names the contenders of this package, `baselines` those they are compared with, and
`missing` gives the reason for each contender that is left out. pytest-benchmark stores the
record as `extra_info`; `bench.harness.report` reads it.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness.counting import count
from bench.harness.timing import copy_bandwidth, kernel_times, matmul_ceiling, measured, peak_of
from deeploop.utils.device import device_name
from deeploop.utils.versions import versions

Record = dict[str, Any]


class Work(NamedTuple):
    """The least that one call has to do, the same for every contender."""

    floor_bytes: float  # fewest bytes read and written
    flops: float | None
    tokens: int | None = None


class Machine:
    """The device of a session. Its ceilings are measured at the first use."""

    def __init__(self, device: torch.device):
        self.device = device
        self.setting = {
            "device": device_name(device),
            "processor": processor(),
            "path": "triton" if device.type == "cuda" else "torch",
            "torch": torch.__version__,
            "triton": versions()["triton"],
            "python": platform.python_version(),
            "commit": commit(),
        }
        self.matmul = functools.cache(functools.partial(matmul_ceiling, device))  # TFLOP/s

    @functools.cached_property
    def copy(self) -> float:
        """The copy bandwidth in GB/s."""
        return copy_bandwidth(self.device)

    def compare(
        self,
        calls: Mapping[str, Callable[[], object]],
        existing: Mapping[str, Sequence[Tensor]],
        rounds: int,
        fused: Mapping[str, Sequence[str]],
        opaque: Iterable[str] = ("compile",),
    ) -> dict[str, dict[str, Any]]:
        """Time the contenders in turns; then count each one's bytes and peak memory, untimed.

        Args:
            existing: by contender, the tensors that stay from call to call.
            fused: by contender, words that the names of its CUDA kernels must contain.
            opaque: contenders whose operators cannot be seen: their `bytes` are None, and on a
                CPU their `peak_bytes`, too.

        Returns:
            The entries of a record, without the figures that depend on its `Work`. On a GPU
            the device waited for the host for the difference of seconds and kernel_seconds.

        Raises:
            AssertionError: a fused kernel did not run.
        """
        cuda = self.device.type == "cuda"
        entries = measured(calls, self.device, rounds)
        for name, entry in entries.items():
            launches = kernel_times(calls[name]) if cuda else []
            for word in fused.get(name, ()) if cuda else ():
                names = {kernel for kernel, _ in launches}
                assert any(word in kernel for kernel in names), f"no {word} kernel in {names}"
            entry["kernel_seconds"] = sum(s for _, s in launches) if cuda else None
            seen = name not in opaque
            entry["bytes"] = counted(calls[name], opened=not cuda)[0] if seen else None
            entry["peak_bytes"] = peak_of(calls[name], existing[name]) if seen or cuda else None
        return entries

    def record(
        self,
        suite: str,
        case: dict[str, Any],
        dtype: torch.dtype,
        work: Work | Mapping[str, Work],
        contenders: dict[str, dict[str, Any]],
        baselines: Iterable[str],
        missing: Mapping[str, str],
        ours: Iterable[str] | None = None,
    ) -> Record:
        """Make the record of one case; the contenders' entries are extended in place.

        Args:
            dtype: the dtype of the matrix products.
            work: the work of every contender, or of each by name.
            ours: the contenders of this package; by default all that are not baselines.
        """
        compared = [name for name in baselines if name in contenders]
        copy, matmul = self.copy, self.matmul(dtype)
        for name, entry in contenders.items():
            its_work = work if isinstance(work, Work) else work[name]
            entry |= its_work._asdict() | achieved(entry["seconds"], its_work, copy, matmul)
        return self.setting | {
            "suite": suite, "case": case, "dtype": str(dtype).removeprefix("torch."),
            "copy_gb_per_s": copy, "matmul_tflop_per_s": matmul, "clocks": clocks(self.device),
            "contenders": contenders, "missing": dict(missing),
            "baselines": compared,
            "ours": list(ours or (name for name in contenders if name not in compared)),
        }  # fmt: skip


def achieved(seconds: float, work: Work, copy: float, matmul: float) -> dict[str, float | None]:
    """Compute the rates of a call and their share of the ceilings (GB/s, TFLOP/s)."""
    bandwidth = work.floor_bytes / seconds / 1e9
    rate = None if work.flops is None else work.flops / seconds / 1e12
    of_copy, of_matmul = bandwidth / copy, None if rate is None else rate / matmul
    return {
        "gb_per_s": bandwidth,
        "of_copy": of_copy,
        "tflop_per_s": rate,
        "of_matmul": of_matmul,
        "of_floor": max(of_copy, of_matmul or 0.0),
        "tokens_per_s": work.tokens / seconds if work.tokens else None,
    }


def cpuinfo(field: str) -> list[str]:
    """List a field of /proc/cpuinfo, once for each core; empty where the system is not Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return re.findall(rf"^{field}\s*: (.+)$", text, re.MULTILINE)


def processor() -> str:
    """Return the CPU's name."""
    return next(iter(cpuinfo("model name")), platform.processor())


def commit() -> str | None:
    """Return this checkout's commit, or DEEPLOOP_COMMIT, for a copy of the files without .git."""
    return os.environ.get("DEEPLOOP_COMMIT") or versions()["commit"]


def clocks(device: torch.device) -> dict[str, float]:
    """Read the clocks in MHz; empty if the system does not report them.

    On a GPU those of the SMs and the memory with their maxima, on a CPU those of the slowest
    and the fastest core.
    """
    if device.type == "cuda":
        return gpu_clocks(device)
    cores = [float(x) for x in cpuinfo("cpu MHz")]
    return {"slowest_core": min(cores), "fastest_core": max(cores)} if cores else {}


def gpu_clocks(device: torch.device) -> dict[str, float]:
    """Ask nvidia-smi, by the device's UUID: its indices are not CUDA's."""
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(names)}"]
    query.append("--format=csv,noheader,nounits")
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [x.strip() for x in output.split(",")]
    if not all(re.fullmatch(r"[\d.]+", x) for x in values):
        return {}
    return {n.removeprefix("clocks."): float(x) for n, x in zip(names, values, strict=True)}


def counted(run: Callable[[], object], opened: bool) -> tuple[int, int]:
    """Count bytes and FLOPs of one call, operator by operator (`bench.harness.counting`)."""
    with count(opened) as steps:
        run()
    return sum(step.unique for step in steps), sum(step.flops for step in steps)


def one_line(record: Record) -> str:
    """Format a record's case and times."""
    case = ", ".join(f"{key} {value}" for key, value in record["case"].items())
    times = ", ".join(f"{name} {c['seconds']:.3g}" for name, c in record["contenders"].items())
    return f"{record['suite']}: {case}: seconds {times}"
