"""Peak FLOP/s, bandwidth and memory of devices: from data sheets, or measured on this CPU."""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.utils.memory import free_memory


class Device(NamedTuple):
    """Peaks of one device from its data sheet, for dense matrices."""

    title: str
    bf16: float  # FLOP/s of bfloat16 matrix products
    fp32: float  # FLOP/s of float32 matrix products, without TF32
    bandwidth: float  # bytes/s of memory
    memory: float  # bytes


DEVICES = {
    "h200": Device("H200 SXM", 989e12, 67e12, 4.8e12, 141e9),
    "h100": Device("H100 SXM", 989e12, 67e12, 3.35e12, 80e9),
    "a100": Device("A100 SXM 80 GB", 312e12, 19.5e12, 2.039e12, 80e9),
    "b200": Device("B200", 2250e12, 75e12, 7.7e12, 180e9),
}


def this_cpu() -> Device:
    """Measure this machine's FLOP/s and copy bandwidth, in about a second.

    Each is the best of a few runs on torch's threads: products of 1024 x 1024 matrices and a
    copy of 256 MiB. Memory is what this process may still take.
    """
    fp32, bf16 = (
        2 * 1024**3 / _best(torch.nn.functional.linear, *torch.ones(2, 1024, 1024, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    x, y = torch.ones(2, 2**26)
    title = f"this CPU ({torch.get_num_threads()} threads)"
    bandwidth = 2 * x.nbytes / _best(x.copy_, y)
    return Device(title, bf16, fp32, bandwidth, free_memory(torch.device("cpu")).bytes)


def _best(work: Callable[..., object], *inputs: Tensor) -> float:
    """Return the seconds of the quickest of five runs, after one that is not timed."""
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        work(*inputs)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def device_of(name: str) -> Device | None:
    """Return the entry of DEVICES for a name from `device_name`; None if there is none."""
    return next((d for key, d in DEVICES.items() if key in name.lower()), None)
