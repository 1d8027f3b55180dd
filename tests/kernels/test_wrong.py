"""The tests are tested: every wrong kernel in wrong/ must make them fail."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import deeploop

pytest.importorskip("triton", reason="Triton is not installed")
HERE = Path(__file__).parent
WRONG = sorted(p.stem for p in (HERE / "wrong").glob("[a-z]*.py"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the package and of these tests, to break."""
    folder = tmp_path_factory.mktemp("wrong")
    shutil.copytree(Path(deeploop.__file__).parent, folder / "deeploop", symlinks=False)
    shutil.copytree(HERE, folder / "kernels_tests")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    return folder


def run(clone: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """The tests on the clone, under the interpreter where they are the kernels' own."""
    path = clone / "kernels_tests"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{clone}:{path}"}
    if tests[0].startswith("interpreter/"):
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, str(path / tests[0]), *tests[1:]],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_rejected(clone, name):
    wrong = importlib.import_module(f"wrong.{name}")
    source = clone / "deeploop" / "kernels" / wrong.FILE
    right = source.read_text()
    assert right.count(wrong.OLD) == getattr(wrong, "COUNT", 1), "the kernel has moved on"
    source.write_text(right.replace(wrong.OLD, wrong.NEW))
    try:
        done = run(clone, wrong.TESTS)
    finally:
        source.write_text(right)
    # 1: tests ran and failed; below 0: the kernel took the process with it, as a write
    # out of bounds may. Not 2 to 5: nothing collected, nothing learnt.
    assert done.returncode == 1 or done.returncode < 0, f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize("name", ["stale_rstd", "wrong_ema_normaliser"])
def test_the_right_kernels_are_accepted_in_the_same_place(clone, name):
    """The clone itself fails nothing: what was rejected was the kernel."""
    done = run(clone, importlib.import_module(f"wrong.{name}").TESTS)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
