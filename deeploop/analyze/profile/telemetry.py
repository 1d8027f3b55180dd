"""Sample a GPU's memory, power and clocks by NVML while code runs."""

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


def gpu_reader(device: torch.device) -> Read | str:
    """Return a function that samples the GPU, or a string that says why there is none."""
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
        read = nvml_reader(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
        read(0.0)
    except pynvml.NVMLError as error:
        return f"no readings: NVML says {error}"
    return read


def nvml_reader(nvml: Any, handle: Any) -> Read:
    """Return a function from a time in seconds to the sample taken then, of one GPU."""

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
def sampling(read: Read | str, every: float = EVERY) -> Iterator[list[Sample]]:
    """Sample from a thread while the code inside runs; yields the list, empty without a reader."""
    samples: list[Sample] = []
    if isinstance(read, str):
        yield samples
        return
    stop, start = threading.Event(), time.perf_counter()

    def sample() -> None:
        while True:
            samples.append(read(time.perf_counter() - start))
            if stop.wait(every):
                return

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def columns(samples: list[Sample]) -> dict[str, list[float]]:
    """Return the samples as one list per field."""
    return {name: [getattr(s, name) for s in samples] for name in Sample._fields}
