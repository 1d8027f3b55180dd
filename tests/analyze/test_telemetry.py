"""Samples of a GPU, by a fake NVML: their units, at least one, none without a GPU."""

import time
from types import SimpleNamespace

import pytest
import torch

from deeploop.analyze.profile.telemetry import (
    Sample,
    columns,
    gpu_reader,
    nvml_reader,
    sampling,
)


def fake_nvml():
    return SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=3 * 2**30),
        nvmlDeviceGetPowerUsage=lambda handle: 650_500,  # milliwatts
        nvmlDeviceGetClockInfo=lambda handle, clock: {1: 1980, 2: 3201}[clock],
    )


def test_readings_are_in_gib_watts_and_megahertz():
    assert nvml_reader(fake_nvml(), None)(1.5) == Sample(1.5, 3.0, 650.5, 1980, 3201)


def test_samples_are_taken_from_start_to_end():
    read = nvml_reader(fake_nvml(), None)
    with sampling(read, every=0.01) as samples:
        pass
    assert len(samples) >= 1
    with sampling(read, every=0.005) as samples:
        time.sleep(0.2)
    count, seconds = len(samples), columns(samples)["seconds"]
    assert count > 3 and seconds == sorted(seconds) and seconds[0] < 0.1
    time.sleep(0.05)
    assert len(samples) == count


def test_the_thread_ends_with_an_error_inside():
    read = nvml_reader(fake_nvml(), None)
    with pytest.raises(ZeroDivisionError), sampling(read, 0.005) as samples:
        raise ZeroDivisionError
    count = len(samples)
    time.sleep(0.03)
    assert len(samples) == count


def test_without_a_gpu_nothing_is_sampled():
    none = gpu_reader(torch.device("cpu"))
    assert none == "none"
    with sampling(none) as samples:
        pass
    assert samples == [] and columns(samples)["power_w"] == []
