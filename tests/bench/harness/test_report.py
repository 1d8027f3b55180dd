"""The report's arithmetic, and the script that needs a GPU where there is none."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.harness import charts, report
from bench.harness.record import Work, achieved

ROOT = Path(__file__).parents[2]


def contender(seconds: float, **more) -> dict:
    return {
        "seconds": seconds, "spread": 0.1, "call_seconds": 2 * seconds, "gb_per_s": 1.0 / seconds,
        "of_copy": 0.5, "bytes": None, "peak_bytes": 3 << 20, **more,
    }  # fmt: skip


SETTING = {
    "device": "a device", "path": "triton", "torch": "2", "triton": "3", "python": "3.11",
    "commit": "abc", "dtype": "float32", "copy_gb_per_s": 100.0,
}  # fmt: skip


def write(path: Path, *records: dict) -> str:
    path.write_text(json.dumps({"benchmarks": [{"name": "k", "extra_info": r} for r in records]}))
    return str(path)


@pytest.fixture
def results(tmp_path):
    """As the first kernel results were written, without a suite."""
    info = SETTING | {
        "op": "pre_norm", "direction": "forward", "rows": 8, "d": 16, "floor_passes": 4,
        "floor_bytes": 2048, "missing": {"apex": "not importable here"},
        "contenders": {
            "ours": contender(1e-6), "eager": contender(3e-6), "compile": contender(1.5e-6),
        },
    }  # fmt: skip
    step = {"name": "step", "extra_info": {"ratio": 1.23456}, "stats": {"median": 0.5}}
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"benchmarks": [{"name": "k", "extra_info": info}, step]}))
    return path


def record(suite: str, case: dict, seconds: dict[str, float], baselines: list[str], **more) -> dict:
    """As `bench.harness.record` writes it: 2 GB and 1 TFLOP of work, a peak of 3 MiB."""
    work = Work(2e9, 1e12, 1000)
    contenders = {
        name: contender(s, kernel_seconds=None) | work._asdict() | achieved(s, work, 100.0, 2.0)
        for name, s in seconds.items()
    }
    return SETTING | {
        "suite": suite, "case": case, "contenders": contenders, "baselines": baselines,
        "ours": [n for n in seconds if n not in baselines], "missing": {}, "clocks": {"sm": 1980.0},
        "processor": "a CPU", "matmul_tflop_per_s": 2.0, **more,
    }  # fmt: skip


def step(loops: int, shipped: float, eager: float, **more) -> dict:
    case = {"residual": "deeploop", "loops": loops}
    return record("step", case, {"shipped": shipped, "eager": eager}, ["eager"], **more)


def loom(loops: int, **seconds: float) -> dict:
    case = {"model": "loom-tiny", "loops": loops, "batch": 8}
    return record("loom", case, seconds, ["full"], ours=list(seconds))


def test_markdown(results, capsys):
    assert report.main([str(results)]) == 0
    text = capsys.readouterr().out
    assert "| pre_norm | forward | 8 x 16 | float32 | 4 | 1.0 | 10% | 2.0 |" in text
    assert "**1.50** (compile)" in text and "| 3.00 |" in text
    assert "apex: not importable here" in text
    assert "| step | 500 | ratio: 1.235 |" in text


def test_a_suite_has_its_table(tmp_path, capsys):
    path = write(tmp_path / "a.json", step(1, 1.0, 1.5), step(4, 2.0, 1.0))
    assert report.main([path]) == 0
    text = capsys.readouterr().out
    assert "## a device (a CPU)" in text and "### Training step by loops" in text
    assert "float32 matrix product 2 TFLOP/s measured here; MHz: sm 1980" in text
    ours = "| deeploop | 1 | float32 | shipped | 1,000 | 10% | 1,000 | 2 | 2% | 1 | 50% | 3 |"
    assert f"{ours} 1.50 | **1.50** (eager) |" in text
    assert "| 0.50 | **0.50** (eager) |" in text


def test_plans_stand_by_loops(tmp_path, capsys):
    records = loom(6, full=2.0, last=1.0), loom(3, full=1.0)
    assert report.main([write(tmp_path / "a.json", *records)]) == 0
    text = capsys.readouterr().out
    assert "| plan | H = 3 | H = 6 |" in text
    assert "| `full` | 1,000 (1.00) | 2,000 (1.00) |" in text
    assert "| `last` |  | 1,000 (0.50) |" in text
    assert "| `full` | 1 (50%) | 0.5 (25%) |" in text


def test_the_stored_results_can_be_read(capsys):
    stored = sorted((ROOT / "bench" / "results").glob("kernels-*.json"))
    assert stored and report.main([str(path) for path in stored]) == 0
    text = capsys.readouterr().out
    assert "| post_sandwich | forward | 65536 x 768 | bfloat16 | 4 | 101.2 |" in text
    # Its peers ran without a CUDA graph, so both are compared with their launches.
    assert "| 2.08 | 1.83 | - | - | 2.34 | **1.83** (compile) |" in text


def test_pngs(results, tmp_path):
    new = write(tmp_path / "new.json", step(1, 1.0, 1.5), loom(3, full=1.0, last=2.0))
    assert report.main([str(results), new, "--plots", str(tmp_path / "plots")]) == 0
    names = ("kernels", "roofline", "step", "loom")
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {f"{n}.png" for n in names}
    assert all(path.stat().st_size > 1000 for path in (tmp_path / "plots").iterdir())
    # Neither loops nor FLOPs are in the first records.
    assert report.main([str(results), "--plots", str(tmp_path / "old")]) == 0
    assert [path.name for path in (tmp_path / "old").iterdir()] == ["kernels.png"]


def test_under_the_roof():
    """At 500 FLOPs a byte 100 GB/s would be 50 TFLOP/s; the products do 2."""
    assert charts.points([step(1, 1.0, 0.5)]) == [
        ("step", True, 500.0, 1.0), ("step", False, 500.0, 2.0),
    ]  # fmt: skip
    assert charts.roof(500.0, copy=100.0, matmul=2.0) == 2.0
    assert charts.roof(2.0, copy=100.0, matmul=2.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("shipped", "eager", "device", "tolerance", "words"),
    [
        (1.0, 1.5, "a device", 1.1, []),
        (1.2, 1.8, "another", 1.1, []),  # slower, but so is the baseline, elsewhere
        (1.2, 1.8, "a device", 1.1, ["worse by 1.20", "seconds 1 -> 1.2"]),
        (1.2, 1.8, "a device", 1.3, []),
        (1.0, 1.2, "another", 1.1, ["worse by 1.25", "time over ours 1.5 -> 1.2"]),
        (0.5, 1.5, "a device", 1.1, ["better by 2.00"]),
    ],
)
def test_against_stored_results(tmp_path, capsys, shipped, eager, device, tolerance, words):
    old = write(tmp_path / "old.json", step(4, 1.0, 1.5))
    new = write(tmp_path / "new.json", step(4, shipped, eager, device=device))
    code = report.main([new, "--against", old, "--tolerance", str(tolerance)])
    text = capsys.readouterr().out
    assert code == any("worse" in word for word in words)
    assert all(word in text for word in words)
    assert ("- worse" in text or "- better" in text) == bool(words)
    if code:
        assert "residual deeploop, loops 4, float32, shipped" in text


def test_more_memory_is_worse_on_the_same_device(tmp_path, capsys):
    before, now = step(4, 1.0, 1.5), step(4, 1.0, 1.5)
    now["contenders"]["shipped"]["peak_bytes"] *= 2
    files = [write(tmp_path / name, r) for name, r in (("a", now), ("b", before))]
    assert report.main([files[0], "--against", files[1]]) == 1
    assert "peak bytes" in capsys.readouterr().out


def test_another_processor_is_another_device_where_there_is_no_gpu(tmp_path):
    before = step(4, 1.0, 1.5)
    for path, code in (("torch", 0), ("triton", 1)):
        now = step(4, 1.2, 1.8, processor="another CPU", path=path)
        files = [write(tmp_path / name, r) for name, r in (("a", now), ("b", before))]
        assert report.main([files[0], "--against", files[1]]) == code


def test_a_baseline_that_only_one_run_had_is_no_change(tmp_path):
    before = step(4, 1.0, 1.5)
    now = record("step", before["case"], {"shipped": 1.0, "eager": 1.5, "compile": 0.5},
                 ["eager", "compile"])  # fmt: skip
    files = [write(tmp_path / name, r) for name, r in (("a", now), ("b", before))]
    assert report.main([files[0], "--against", files[1]]) == 0
    assert report.main([files[1], "--against", files[0]]) == 0


def test_plain_plans_are_held_against_stored_ones_too(tmp_path, capsys):
    """`full` is a baseline and ours at once."""
    old = write(tmp_path / "old.json", loom(3, full=1.0, last=0.5))
    new = write(tmp_path / "new.json", loom(3, full=1.5, last=0.5))
    assert report.main([new, "--against", old]) == 1
    assert "float32, full: seconds 1 -> 1.5" in capsys.readouterr().out


def test_old_kernel_results_can_be_compared(results, capsys):
    assert report.main([str(results), "--against", str(results)]) == 0
    assert "1 cases against stored ones" in capsys.readouterr().out


def test_what_cannot_be_read_is_named(results, tmp_path, capsys):
    def refused(*arguments: str) -> str:
        assert report.main(list(arguments)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "none.json" in refused(str(tmp_path / "none.json"))
    (tmp_path / "empty.json").write_text('{"benchmarks": []}')
    assert "no benchmark ran" in refused(str(tmp_path / "empty.json"))
    foreign = [{"extra_info": {"contenders": {}}}, {"name": "a", "extra_info": {}}, 1]
    for text in ("not JSON", "[]", "{}", *(json.dumps({"benchmarks": [b]}) for b in foreign)):
        (tmp_path / "wrong.json").write_text(text)
        assert "wrong.json" in refused(str(tmp_path / "wrong.json"))
    other = write(tmp_path / "other.json", step(1, 1.0, 1.0))
    assert "no case in common" in refused(str(results), "--against", other)
    assert "at least 1" in refused(other, "--against", other, "--tolerance", "0.9")


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
import bench.suites.bench_kernels, bench.kernels.checks, bench.harness.report, bench.kernels.traffic, bench.kernels.tune
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
        [*command, "bench/suites/bench_kernels.py"],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 9, result.stdout + result.stderr
    assert "nothing is timed" in result.stdout + result.stderr
