import os
import time

import pytest

from bench.harness.record import Machine
from deeploop.utils.device import pick_device

START, SECONDS = time.monotonic(), float(os.environ.get("DEEPLOOP_BENCH_SECONDS", "inf"))


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine(pick_device("auto"))


@pytest.fixture(autouse=True)
def skip_if_late() -> None:
    """Skip the cases that have not started when DEEPLOOP_BENCH_SECONDS are over.

    So the records of the cases before are still written.
    """
    if time.monotonic() - START > SECONDS:
        pytest.skip(f"the {SECONDS:.0f} s for this bench are over")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the experts last: their settings of malloc stay with the process."""
    items.sort(key=lambda item: item.path.name == "bench_moe.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Use no workers under `-n auto`: cases are timed one after another, in one process."""
    return 0
