"""Plant one fault in a copy of the source and see whether the test named for it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = ("kernels", "deeploop", "tests")  # and pyproject.toml
SECONDS = 300  # at most, for one mutant


class Mutant(NamedTuple):
    """One fault, as an edit of a source file, and a test that must fail on it."""

    name: str
    why: str  # it is wrong
    file: str  # under the repository's root
    old: str  # text that the file holds once
    new: str  # text in its place
    test: str  # node id under tests/

    @property
    def interpreted(self) -> bool:
        """Whether its test needs a process in which Triton interprets its kernels."""
        return self.test.startswith("kernels/interpreter/")


class Result(NamedTuple):
    """The end of a run of pytest."""

    code: int  # pytest's, or minus the signal that ended the process
    output: str
    seconds: float

    @property
    def failed(self) -> bool:
        """Whether tests ran and one failed, or the process died, as a write out of bounds may.

        Not 2 to 5: nothing was collected, so nothing was learnt.
        """
        return self.code == 1 or self.code < 0


def stale(mutant: Mutant, root: Path = ROOT) -> str:
    """Return a sentence on why a mutant cannot be planted or tested any more; "" if it can."""
    count = (root / mutant.file).read_text().count(mutant.old)
    if count != 1:
        return f"{mutant.name}: {mutant.file} holds this {count} times, not once: {mutant.old!r}"
    file, _, test = mutant.test.partition("::")
    path = root / "tests" / file
    if not path.is_file() or f"def {test.partition('[')[0]}(" not in path.read_text():
        return f"{mutant.name}: there is no test {mutant.test}"
    return ""


def run(mutant: Mutant) -> Result:
    """Run a mutant's test in a copy of the source with its fault; raises ValueError if stale."""
    if reason := stale(mutant):
        raise ValueError(reason)
    return _pytest([mutant.test], mutant)


def run_unchanged(mutants: Iterable[Mutant]) -> list[Result]:
    """Run the tests of some mutants in a copy without a fault, where all must pass."""
    by_kind: dict[bool, set[str]] = {}
    for mutant in mutants:
        by_kind.setdefault(mutant.interpreted, set()).add(mutant.test)
    return [_pytest(sorted(tests)) for tests in by_kind.values()]


def _pytest(tests: list[str], mutant: Mutant | None = None) -> Result:
    """Run tests on a copy of the source, in which a mutant's text is exchanged."""
    with tempfile.TemporaryDirectory(prefix="deeploop-mutant-") as folder:
        root = Path(folder)
        for name in COPIED:  # compiled files, too: imports are faster
            shutil.copytree(ROOT / name, root / name, symlinks=True)
        shutil.copy(ROOT / "pyproject.toml", root)
        if mutant is not None:
            file = root / mutant.file
            file.write_text(file.read_text().replace(mutant.old, mutant.new))
        interpreted = tests[0].startswith("kernels/interpreter/")
        env = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no workers, and a faster start
        env |= {"TRITON_INTERPRET": "1"} if interpreted else {}
        command = [sys.executable, "-m", "pytest", "-x", "--tb=short", "-pno:cacheprovider"]
        command += [f"tests/{test}" for test in tests]
        start = time.monotonic()
        try:
            done = subprocess.run(
                command, cwd=root, env=env, timeout=SECONDS, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Result(-1, f"no end after {SECONDS} s", time.monotonic() - start)
        return Result(done.returncode, done.stdout, time.monotonic() - start)
