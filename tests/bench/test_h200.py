"""The GPU script: its stages exist and come in order, and it ends as it says."""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench.kernels.ops import OPS
from bench.suites import bench_kernels
from deeploop import kernels

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "bench" / "h200.sh")
SUITES = {path.stem for path in (ROOT / "bench" / "suites").glob("bench_*.py")}
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def stages() -> dict[str, list[str]]:
    """Return the commands of all stages by name."""
    listed = run("bash", SCRIPT, "--list", TUNE="1", STEPS="1")
    assert listed.returncode == 0, listed.stderr
    rows = [line.split("\t") for line in listed.stdout.splitlines()]
    assert all(0 < int(seconds) <= 240 for _, seconds, _ in rows)
    return {name: shlex.split(command) for name, _, command in rows}


def test_every_file_and_module_of_a_stage_exists(stages):
    for name, command in stages.items():
        module = command[command.index("-m") + 1]
        assert find_spec(module), f"{name}: no module {module}"
        for word in command:
            if re.match(r"(tests|bench/suites)/", word):
                assert (ROOT / word).exists(), f"{name}: no file {word}"


def test_checks_come_before_speed_and_every_op_and_suite_is_timed(stages):
    names = list(stages)
    first = next(i for i, name in enumerate(names) if name.startswith("speed"))
    checks = ["environment", "GPU tests", "first launches", "memcheck", "determinism"]
    assert sorted(checks, key=names.index) == checks and names.index(checks[-1]) < first
    assert all("pytest" not in stages[name] for name in names[first:] if "speed" not in name)
    timed = [name.removeprefix("speed of ") for name in names if name.startswith("speed")]
    for op in OPS:
        assert {f"{op.name}, main", f"{op.name}, others"} <= set(timed)
    assert {f"bench_{name.removesuffix(', suite')}" for name in timed if "suite" in name} == (
        SUITES - {"bench_kernels"}
    )
    main = next(c[c.index("-k") + 1] for n, c in stages.items() if n.endswith(", main"))
    assert main in [f"{rows}x{d}" for _, (rows, d) in bench_kernels.ON_CUDA]


def pytest_here(*options: str) -> tuple[int, str]:
    """Run pytest in this process, which has imported torch; returns its exit code and output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = pytest.main([*options, "-p", "no:xdist", "-p", "no:cacheprovider", "--capture=no"])
    return int(code), printed.getvalue()


def test_every_stage_of_tests_collects_some_and_every_suite_has_cases(stages, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = {
        name: [w for w in command[command.index("pytest") + 1 :] if w not in ("-n", "12")]
        for name, command in stages.items()
        if "pytest" in command and not name.startswith("speed")
    }
    assert len(options) == 4
    options["bench"] = ["-q", "bench"]
    collected = {name: pytest_here(*words, "--collect-only") for name, words in options.items()}
    for name, (code, printed) in collected.items():
        assert code == 0, f"{name}: {printed}"  # 5: none was collected
    assert all(f"bench/suites/{suite}.py" in collected["bench"][1] for suite in SUITES)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_run(tmp_path):
    result = run("bash", SCRIPT, str(tmp_path))
    assert result.returncode == 3
    assert len(result.stdout.splitlines()) == 1 and not any(tmp_path.iterdir())


def test_kernels_are_timed_without_the_trainers_packages():
    code = """
import sys
for name in ("tyro", "rich", "pyarrow", "tokenizers", "liger_kernel"):
    sys.modules[name] = None
import bench.suites.bench_kernels, bench.harness.report
import bench.kernels.checks, bench.kernels.traffic, bench.kernels.tune
"""
    result = run(sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("fault", ["wrong", "raising"])
def test_an_op_of_ours_that_fails_ends_the_bench(fault, monkeypatch):
    """Its exit code is 9: the script continues after any other."""

    def pre_norm(h, f, w_next, scale, eps):
        if fault == "raising":
            raise ValueError("no")
        return h + f, h * w_next

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(kernels, "pre_norm", pre_norm)
    code, printed = pytest_here("-q", "bench/suites/bench_kernels.py", "-k", "pre_norm")
    assert code == 9 and "nothing is timed" in printed, printed
