"""What every record of the bench carries, whatever it timed.

A record is one case: where it ran (device, clocks, versions, commit), what a call has to
do whoever does it (`Work`), what the device reaches at best (the ceilings), and its
contenders by name, each with seconds, what `bench.timing.measured` adds to them, the
`bytes` that its operators move, `peak_bytes` that it holds at most beyond what was there,
its `Work`, and what `achieved` makes of the seconds:

    gb_per_s    the floor in bytes over the time; of_copy: over the measured copy bandwidth
    tflop_per_s the work's FLOPs over the time; of_matmul: over the measured matrix product
    of_floor    the least time that both ceilings allow, over the time

`ours` names the contenders of this package, `baselines` those they are held against.
pytest-benchmark writes the record as `extra_info`; `bench.report` reads it.
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

from bench.counting import count
from bench.timing import copy_bandwidth, kernel_times, matmul_ceiling, measured, peak_of
from deeploop.kernels import _launch
from deeploop.utils import versions
from deeploop.utils.device import device_name

Record = dict[str, Any]


class Work(NamedTuple):
    """What one call has to do."""

    floor_bytes: float  # read and written at least
    flops: float | None
    tokens: int | None = None  # that it gets done


class Machine:
    """Where a session runs. The ceilings are measured when first asked for, then kept."""

    def __init__(self, device: torch.device):
        self.device = device
        self.setting = {
            "device": device_name(device),
            "processor": processor(),
            "path": "triton" if device.type == "cuda" else "torch",
            "torch": torch.__version__,
            "triton": _launch.triton.__version__ if _launch.triton else None,
            "python": platform.python_version(),
            "commit": commit(),
        }
        self.matmul = functools.cache(functools.partial(matmul_ceiling, device))  # TFLOP/s

    @functools.cached_property
    def copy(self) -> float:
        """GB/s."""
        return copy_bandwidth(self.device)

    def compare(
        self,
        calls: Mapping[str, Callable[[], object]],
        held: Mapping[str, Sequence[Tensor]],
        rounds: int,
        fused: Mapping[str, Sequence[str]],
        opaque: Iterable[str] = ("compile",),
    ) -> dict[str, dict[str, Any]]:
        """Contenders in turns; then, untimed, the bytes each moves and holds at most.

        held: by contender the tensors that stay from call to call. fused: words that the names
        of its CUDA kernels must contain, or the fused path did not run (AssertionError). Of
        `opaque` ones no operators are to be seen: their bytes are None, on a CPU their peak, too.

        On a GPU kernel_seconds is the sum over the kernels of one call: what `seconds` has over
        it, the device waited for the host.
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
            entry["peak_bytes"] = peak_of(calls[name], held[name]) if seen or cuda else None
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
        """One case, whole; the contenders' own entries are extended.

        dtype: of its matrix products. work: the same for all, or by contender. ours: those of
        this package; by default all that are no baselines.
        """
        compared = [name for name in baselines if name in contenders]
        copy, matmul = self.copy, self.matmul(dtype)
        for name, entry in contenders.items():
            own = work if isinstance(work, Work) else work[name]
            entry |= own._asdict() | achieved(entry["seconds"], own, copy, matmul)
        return self.setting | {
            "suite": suite, "case": case, "dtype": str(dtype).removeprefix("torch."),
            "copy_gb_per_s": copy, "matmul_tflop_per_s": matmul, "clocks": clocks(self.device),
            "contenders": contenders, "missing": dict(missing),
            "baselines": compared,
            "ours": list(ours or (name for name in contenders if name not in compared)),
        }  # fmt: skip


def achieved(seconds: float, work: Work, copy: float, matmul: float) -> dict[str, float | None]:
    """What a time means for a work; copy in GB/s, matmul in TFLOP/s."""
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
    """A field of every core, where the system is Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    return re.findall(rf"^{field}\s*: (.+)$", text, re.MULTILINE)


def processor() -> str:
    """The CPU's name."""
    return next(iter(cpuinfo("model name")), platform.processor())


def commit() -> str | None:
    """Of this tree; DEEPLOOP_COMMIT names it where there is only a copy of the files."""
    return os.environ.get("DEEPLOOP_COMMIT") or versions.commit()


def clocks(device: torch.device) -> dict[str, float]:
    """MHz now: of a GPU's SMs and memory, and their most; of a CPU's slowest and fastest core.

    Empty where the system does not say.
    """
    if device.type == "cuda":
        return gpu_clocks(device)
    found = [float(x) for x in cpuinfo("cpu MHz")]
    return {"slowest_core": min(found), "fastest_core": max(found)} if found else {}


def gpu_clocks(device: torch.device) -> dict[str, float]:
    """By nvidia-smi, which is asked for the device's UUID: it counts them in its own way."""
    names = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(names)}"]
    query.append("--format=csv,noheader,nounits")
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    found = [x.strip() for x in said.split(",")]
    if not all(re.fullmatch(r"[\d.]+", x) for x in found):
        return {}
    return {n.removeprefix("clocks."): float(x) for n, x in zip(names, found, strict=True)}


def counted(run: Callable[[], object], opened: bool) -> tuple[int, int]:
    """Bytes and FLOPs of one call, operator by operator (see `bench.counting`)."""
    with count(opened) as steps:
        run()
    return sum(step.unique for step in steps), sum(step.flops for step in steps)


def say(record: Record) -> str:
    """One line for those who watch."""
    case = ", ".join(f"{key} {value}" for key, value in record["case"].items())
    times = ", ".join(f"{name} {c['seconds']:.3g}" for name, c in record["contenders"].items())
    return f"{record['suite']}: {case}: seconds {times}"
