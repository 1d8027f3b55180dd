"""Run pytest in processes where Triton interprets its kernels on the CPU.

Triton decides when it is imported whether it interprets, so these tests cannot share the
caller's process. Their processes are forked from a server that loads torch and Triton once
for each caller, which takes 5 s less than loading both in every one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

KERNEL_TESTS = Path(__file__).parents[1] / "kernels"
SECONDS = 300  # at most, for one process

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(["torch._dynamo", "triton.language", "pytest"])
_ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "OMP_NUM_THREADS": "1",
    "PYTEST_ADDOPTS": "",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}


def run_interpreted(tests: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run kernel tests under Triton's interpreter, in a process of its own.

    Args:
        tests: Files or node ids under tests/kernels/, or absolute paths.
        folder: Empty folder for the log.

    Returns:
        The exit code (pytest's, or minus the signal that ended the process) and the output.
    """
    log = folder / "pytest.log"
    process = _server.Process(target=_pytest, args=(list(tests), log))
    # The server takes over the environment of the first start.
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode, log.read_text() if log.exists() else "nothing was printed"


def _pytest(tests: list[str], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    import pytest

    # sys.path is the caller's already, and the caller's options (as -n) must not apply here.
    options = ["-q", "--tb=short", "-pno:cacheprovider", "-oaddopts=", "-opythonpath="]
    paths = [str(KERNEL_TESTS / test) for test in tests]
    sys.exit(pytest.main([*options, f"--confcutdir={KERNEL_TESTS}", *paths]))
