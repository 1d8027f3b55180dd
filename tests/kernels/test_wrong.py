"""The tests are tested: every wrong kernel in wrong/ must make them fail."""

import importlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import deeploop

pytest.importorskip("triton", reason="Triton is not installed")
HERE = Path(__file__).parent
WRONG = sorted(p.stem for p in (HERE / "wrong").glob("[a-z]*.py"))


RIGHT = ["stale_rstd", "wrong_ema_normaliser"]  # whose tests also run on the right kernels


def judge(folder: Path, name: str, right: bool) -> tuple[int, str]:
    """Exit code and output of a wrong kernel's tests, on a clone with it (or without)."""
    wrong = importlib.import_module(f"wrong.{name}")
    shutil.copytree(Path(deeploop.__file__).parent, folder / "deeploop", symlinks=False)
    shutil.copytree(HERE, folder / "kernels_tests")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    source = folder / "deeploop" / "kernels" / wrong.FILE
    text = source.read_text()
    if text.count(wrong.OLD) != getattr(wrong, "COUNT", 1):
        return 0, f"{wrong.FILE} has moved on: it no longer holds {wrong.OLD!r}"
    if not right:
        source.write_text(text.replace(wrong.OLD, wrong.NEW))
    done = run(folder, wrong.TESTS)
    return done.returncode, done.stdout + done.stderr


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


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    """Every verdict, asked for two at a time: each keeps one core busy for seconds."""
    cases = [(name, False) for name in WRONG] + [(name, True) for name in RIGHT]
    folders = [tmp_path_factory.mktemp("clone") for _ in cases]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(judge, folders, *zip(*cases, strict=True))
        return dict(zip(cases, found, strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_rejected(verdicts, name):
    code, said = verdicts[name, False]
    # 1: tests ran and failed; below 0: the kernel took the process with it, as a write
    # out of bounds may. Not 2 to 5: nothing collected, nothing learnt.
    assert code == 1 or code < 0, said


@pytest.mark.parametrize("name", RIGHT)
def test_the_right_kernels_are_accepted_in_the_same_place(verdicts, name):
    """The clone itself fails nothing: what was rejected was the kernel."""
    code, said = verdicts[name, True]
    assert code == 0, said
