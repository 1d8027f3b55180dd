import os
import time

import pytest

from bench.harness.record import Machine
from deeploop.utils.device import pick_device

BEGAN, BUDGET = time.monotonic(), float(os.environ.get("DEEPLOOP_BENCH_SECONDS", "inf"))


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine(pick_device("auto"))


@pytest.fixture(autouse=True)
def in_time() -> None:
    """DEEPLOOP_BENCH_SECONDS=N skips what has not begun after N seconds: the rest is written."""
    if time.monotonic() - BEGAN > BUDGET:
        pytest.skip(f"the {BUDGET:.0f} s for this bench are over")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The experts last: how they set up malloc stays with the process."""
    items.sort(key=lambda item: item.path.name == "bench_moe.py")
