"""A GPU's own readings while something runs: memory, power and clocks, by NVML."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

EVERY = 0.05  # seconds between samples


class Sample(NamedTuple):
    """One reading of one GPU."""

    seconds: float  # since the first
    used_gib: float  # of the device's memory, by every process
    power_w: float
    sm_mhz: int
    memory_mhz: int


Read = Callable[[float], Sample]


def reader(device: torch.device) -> Read | str:
    """What reads a GPU now, or why nothing does."""
    if device.type != "cuda":
        return "none"
    try:
        import pynvml
    except ImportError:
        return "no readings without nvidia-ml-py: pip install 'deeploop[gpu]'"
    try:
        pynvml.nvmlInit()
        # By UUID: NVML does not heed CUDA_VISIBLE_DEVICES.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        read = reading(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        read(0.0)
    except pynvml.NVMLError as error:
        return f"no readings: NVML says {error}"
    return read


def reading(nvml: Any, handle: Any) -> Read:
    """Reads one GPU through pynvml; the argument is when."""

    def read(seconds: float) -> Sample:
        return Sample(
            seconds,
            nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30,
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        )

    return read


@contextlib.contextmanager
def sampled(read: Read | str, every: float = EVERY) -> Iterator[list[Sample]]:
    """Samples of the time inside, by a thread; none where there is nothing to read."""
    samples: list[Sample] = []
    if isinstance(read, str):
        yield samples
        return
    over, began = threading.Event(), time.perf_counter()

    def watch() -> None:
        while True:
            samples.append(read(time.perf_counter() - began))
            if over.wait(every):
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def columns(samples: list[Sample]) -> dict[str, list[float]]:
    """The samples by field."""
    return {name: [getattr(s, name) for s in samples] for name in Sample._fields}
