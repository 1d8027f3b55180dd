"""Runs the Triton kernels themselves, on CPU, in processes of their own.

Triton decides when it is imported whether it interprets, so the tests in
interpreter/ cannot share this process. They are the longest part of the suite and
each file runs on one core, so two run at a time.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
HERE = Path(__file__).parent
FILES = sorted((HERE / "interpreter").glob("test_*.py"), key=lambda p: -p.stat().st_size)


def run(file: Path) -> str | None:
    """What a failing file printed; None where it passed."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    paths = [str(HERE), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, str(file)], env=environment, capture_output=True, text=True)
    return None if done.returncode == 0 else f"{file.name}:\n{done.stdout}{done.stderr}"


def test_interpreter_suite():
    assert FILES
    with ThreadPoolExecutor(2) as pool:
        failures = [said for said in pool.map(run, FILES) if said is not None]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
