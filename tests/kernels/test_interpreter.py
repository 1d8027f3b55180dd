"""Runs the Triton kernels themselves, on CPU, in a process of their own.

Triton decides when it is imported whether it interprets, so the tests in
interpreter/ cannot share this process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
HERE = Path(__file__).parent


def test_interpreter_suite():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    paths = [str(HERE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, str(HERE / "interpreter")], env=environment, capture_output=True, text=True
    )
    if result.returncode != 0:
        pytest.fail(f"interpreter suite:\n{result.stdout}{result.stderr}", pytrace=False)
