"""The report's arithmetic, and the script that needs a GPU where there is none."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import report

ROOT = Path(__file__).parents[2]


def contender(seconds: float) -> dict:
    return {
        "seconds": seconds, "spread": 0.1, "call_seconds": 2 * seconds, "gb_per_s": 1.0 / seconds,
        "of_copy": 0.5, "bytes": None, "peak_bytes": 3 << 20,
    }  # fmt: skip


@pytest.fixture
def results(tmp_path):
    info = {
        "device": "a device", "path": "triton", "torch": "2", "triton": "3", "python": "3.11",
        "commit": "abc", "op": "pre_norm", "direction": "forward", "rows": 8, "d": 16,
        "dtype": "float32", "floor_passes": 4, "floor_bytes": 2048, "copy_gb_per_s": 100.0,
        "missing": {"apex": "not importable here"},
        "contenders": {
            "ours": contender(1e-6), "eager": contender(3e-6), "compile": contender(1.5e-6),
        },
    }  # fmt: skip
    step = {"name": "step", "extra_info": {"ratio": 1.23456}, "stats": {"median": 0.5}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"benchmarks": [{"name": "k", "extra_info": info}, step]}))
    return path


def test_markdown(results, capsys):
    assert report.main([str(results)]) == 0
    text = capsys.readouterr().out
    assert "| pre_norm | forward | 8 x 16 | float32 | 4 | 1.0 | 10% | 2.0 |" in text
    assert "**1.50** (compile)" in text and "| 3.00 |" in text
    assert "apex: not importable here" in text
    assert "| step | 500 | ratio: 1.235 |" in text


def test_png(results, tmp_path, capsys):
    assert report.main([str(results), "--png", str(tmp_path / "bars.png")]) == 0
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_what_cannot_be_read_is_named(tmp_path, capsys):
    assert report.main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    (tmp_path / "empty.json").write_text('{"benchmarks": []}')
    assert report.main([str(tmp_path / "empty.json")]) == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_gpu_script_says_that_there_is_none(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "bench" / "h200.sh"), str(tmp_path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 3
    assert len(result.stdout.splitlines()) == 1 and not any(tmp_path.iterdir())


def test_the_bench_imports_without_the_trainers_packages():
    code = """
import sys
for name in ("tyro", "rich", "pyarrow", "tokenizers", "liger_kernel"):
    sys.modules[name] = None
import bench.bench_kernels, bench.checks, bench.report, bench.traffic, bench.tune
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, check=True)


def test_several_files_make_one_table_by_op(results, tmp_path, capsys):
    """As the GPU script writes them: a file per op and part of the shapes."""
    found = json.loads(results.read_text())
    paths = [results]
    for i, (op, copy) in enumerate([("inject", 101.0), ("pre_norm", 99.0)]):
        info = found["benchmarks"][0]["extra_info"] | {"op": op, "copy_gb_per_s": copy, "d": 32}
        paths.append(tmp_path / f"{i}.json")
        paths[-1].write_text(json.dumps({"benchmarks": [{"name": "k", "extra_info": info}]}))
    assert report.main([str(path) for path in paths]) == 0
    text = capsys.readouterr().out
    assert "copy bandwidth 99 to 101 GB/s" in text
    lines = [line.split(" |")[:3] for line in text.splitlines() if " | forward |" in line]
    assert [line[0] for line in lines] == ["| pre_norm", "| pre_norm", "| inject"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_gpu_script_is_bash():
    subprocess.run(["bash", "-n", str(ROOT / "bench" / "h200.sh")], check=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("fault", ["wrong", "raising"])
def test_an_op_of_ours_that_fails_ends_the_bench(fault, tmp_path):
    """With an exit code of its own: the GPU script goes on after any other."""
    (tmp_path / "conftest.py").write_text(f"""
import deeploop.kernels as kernels
def pre_norm(h, f, w_next, scale, eps):
    if {fault == "raising"}:
        raise ValueError("no")
    return h + f, h * w_next
kernels.pre_norm = pre_norm
""")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider"]
    environment = os.environ | {
        "DEEPLOOP_BENCH_OPS": "pre_norm", "PYTHONPATH": f"{tmp_path}:{ROOT}",
    }  # fmt: skip
    result = subprocess.run(
        [*command, "bench/bench_kernels.py"],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 9, result.stdout + result.stderr
    assert "nothing is timed" in result.stdout + result.stderr
