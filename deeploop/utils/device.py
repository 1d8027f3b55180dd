"""The device a run is on: which, what it computes in, how much memory it took."""

import contextlib
import os
import platform
import resource
import sys

import torch

from deeploop.utils.errors import InputError


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; raises InputError for what is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"train.device={name!r}: must be auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"train.device={name!r}: this machine shows {torch.cuda.device_count()} CUDA devices"
        )
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"train.device={name!r}: must be auto, cpu, cuda or cuda:N")
    return device


def computes_in_bf16(device: torch.device) -> bool:
    """Whether bfloat16 GEMMs are in the hardware, not emulated."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in probes)


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """What autocast, where it is on, would hand to a GEMM in the place of x; else x's own."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def peak_memory(device: torch.device) -> float:
    """GiB: the device's peak allocation, or on a CPU the process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager:
    """bfloat16 autocast on `device` where precision is "bf16", else nothing.

    Without autocast's weight cache: with it all visits of a weight share one
    bfloat16 copy and their gradients add up in bfloat16, an error that grows with
    the loops (measured against float32 at 16 loops: 0.9% with, 0.5% without,
    no more than that of a single visit).
    """
    enabled = precision == "bf16"
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)


def host_memory() -> int:
    """Bytes of memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
