"""The report: its tables, its charts, and the comparison with stored results."""

import json
from pathlib import Path

import pytest

from bench.harness import charts, report
from bench.harness.record import Work, achieved

RESULTS = Path(__file__).parents[3] / "bench" / "results"
SETTING = {
    "device": "a device", "path": "triton", "torch": "2", "triton": "3", "python": "3.11",
    "commit": "abc", "dtype": "float32", "copy_gb_per_s": 100.0,
}  # fmt: skip


def record(suite: str, case: dict, seconds: dict[str, float], baselines: list[str], **more) -> dict:
    """Make a record of 2 GB and 1 TFLOP of work with a peak of 3 MiB."""
    work = Work(2e9, 1e12, 1000)
    contenders = {
        name: {
            "seconds": s, "spread": 0.1, "call_seconds": 2 * s, "kernel_seconds": None,
            "bytes": None, "peak_bytes": 3 << 20,
        } | work._asdict() | achieved(s, work, 100.0, 2.0)
        for name, s in seconds.items()
    }  # fmt: skip
    return SETTING | {
        "suite": suite, "case": case, "contenders": contenders, "baselines": baselines,
        "ours": [n for n in seconds if n not in baselines], "missing": {}, "clocks": {"sm": 1980.0},
        "processor": "a CPU", "matmul_tflop_per_s": 2.0, **more,
    }  # fmt: skip


def kernel(op: str, **more) -> dict:
    """Make a record of the first kernel results, which had no suite."""
    seconds = {"ours": 1e-6, "eager": 3e-6, "compile": 1.5e-6}
    made = record("", {}, seconds, []) | {"missing": {"apex": "not installed"}, "floor_passes": 4}
    for entry in made["contenders"].values():
        del entry["flops"]
    for key in ("suite", "case", "baselines", "ours", "matmul_tflop_per_s"):
        del made[key]
    return made | {"op": op, "direction": "forward", "rows": 8, "d": 16} | more


def step(loops: int, shipped: float, eager: float, **more) -> dict:
    case = {"residual": "deeploop", "loops": loops}
    return record("step", case, {"shipped": shipped, "eager": eager}, ["eager"], **more)


def loom(loops: int, **seconds: float) -> dict:
    case = {"model": "loom-tiny", "loops": loops, "batch": 8}
    return record("loom", case, seconds, ["full"], ours=list(seconds))


@pytest.fixture
def write(tmp_path):
    def write(name: str, *infos: dict) -> str:
        benchmarks = [{"name": "b", "stats": {"median": 0.5}, "extra_info": i} for i in infos]
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"benchmarks": benchmarks}))
        return str(path)

    return write


def test_a_table_for_each_suite(write, capsys):
    """Several files make one report, with the rows of an op together."""
    first = write("a", kernel("pre_norm"), step(1, 1.0, 1.5), {"ratio": 1.23456})
    second = write("b", kernel("inject", copy_gb_per_s=99.0))
    third = write("c", kernel("pre_norm", d=32), step(4, 2.0, 1.0), loom(6, full=2.0, last=1.0))
    assert report.main([first, second, third]) == 0
    text = capsys.readouterr().out
    assert "| pre_norm | forward | 8 x 16 | float32 | 4 | 1.0 | 10% | 2.0 |" in text
    assert "| 3.00 | 1.50 | - | - | - | **1.50** (compile) |" in text
    lines = [line for line in text.splitlines() if " | forward |" in line]
    assert [line.split(" |")[0] for line in lines] == ["| pre_norm", "| pre_norm", "| inject"]
    assert "- apex: not installed" in text and "copy bandwidth 99 to 100 GB/s" in text
    assert "float32 matrix product 2 TFLOP/s measured here; MHz: sm 1980" in text
    ours = "| deeploop | 1 | float32 | shipped | 1,000 | 10% | 1,000 | 2 | 2% | 1 | 50% | 3 |"
    assert f"{ours} 1.50 | **1.50** (eager) |" in text
    assert "| `last` | 1,000 (0.50) |" in text and "| `full` | 0.5 (25%) |" in text
    assert "| b | ratio: 1.235 | 500 |" in text


def test_contenders_without_a_cuda_graph_are_compared_with_their_launches(capsys):
    assert report.main([str(RESULTS / "kernels-h200-2026-11-29.json")]) == 0
    assert "| 2.08 | 1.83 | - | - | 2.34 | **1.83** (compile) |" in capsys.readouterr().out


def test_charts_of_the_suites_that_have_records(write, tmp_path, pictures):
    old, new = write("old", kernel("pre_norm")), write("new", step(1, 1.0, 1.5), loom(3, full=1.0))
    assert report.main([old, new, "--plots", str(tmp_path / "all")]) == 0
    assert {p.stem for p in (tmp_path / "all").iterdir()} == {"kernels", "roofline", "step", "loom"}
    assert report.main([old, "--plots", str(tmp_path / "old")]) == 0
    assert [p.stem for p in (tmp_path / "old").iterdir()] == ["kernels"]


def test_points_under_the_roof():
    """At 500 FLOPs a byte 100 GB/s would allow 50 TFLOP/s; the matrix product reaches 2."""
    points = [("step", True, 500.0, 1.0), ("step", False, 500.0, 2.0)]
    assert charts.points([step(1, 1.0, 0.5)]) == points
    assert charts.roof(500.0, copy=100.0, matmul=2.0) == 2.0
    assert charts.roof(2.0, copy=100.0, matmul=2.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("now", "tolerance", "change"),
    [
        (step(4, 1.0, 1.5), 1.1, None),
        (step(4, 1.2, 1.8), 1.1, "worse by 1.20: step, residual deeploop, loops 4, float32"),
        (step(4, 1.2, 1.8), 1.3, None),
        (step(4, 1.2, 1.8, processor="another"), 1.1, "worse by 1.20"),  # the same GPU
        (step(4, 0.5, 1.5), 1.1, "better by 2.00"),
        (record("step", {"residual": "deeploop", "loops": 4},
                {"shipped": 1.0, "eager": 1.5, "compile": 0.5}, ["eager", "compile"]), 1.1, None),
    ],
)  # fmt: skip
def test_against_stored_results(write, capsys, now, tolerance, change):
    command = [write("new", now), "--against", write("old", step(4, 1.0, 1.5))]
    code = report.main([*command, "--tolerance", str(tolerance)])
    text = capsys.readouterr().out
    assert code == ("worse" in (change or ""))
    assert change in text if change else "- worse" not in text and "- better" not in text


CPU = {"path": "torch", "device": "x86_64 CPU, 2 threads", "processor": "EPYC"}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"device": "x86_64 CPU, 1 threads"}, "x86_64 CPU, 1 threads, EPYC"),
        ({"processor": "Xeon"}, "x86_64 CPU, 2 threads, Xeon"),
        ({"path": "triton", "device": "NVIDIA H200"}, "NVIDIA H200"),
    ],
)
def test_results_of_another_machine_or_thread_count_are_not_compared(write, capsys, other, words):
    stored = write("old", step(4, 1.0, 1.5, **CPU), step(1, 1.0, 1.5, **CPU))
    elsewhere = step(4, 9.0, 1.5, **CPU | other)
    assert report.main([write("new", elsewhere), "--against", stored]) == 2
    printed = capsys.readouterr()
    where = f"measured on {words}, stored on x86_64 CPU, 2 threads, EPYC"
    assert where in printed.err and "worse" not in printed.out
    same = step(1, 1.0, 1.5, **CPU)
    assert report.main([write("new", elsewhere, same), "--against", stored]) == 0
    printed = capsys.readouterr()
    assert "1 cases against stored ones" in printed.out
    assert f"1 cases were not compared: {where}." in printed.out
    assert report.main([write("new", elsewhere), "--against", stored, write("b", elsewhere)]) == 0


def test_memory_and_full_backprop_are_compared_too(write, capsys):
    now = loom(3, full=1.5, last=0.5)
    now["contenders"]["last"]["peak_bytes"] *= 2
    old = write("old", loom(3, full=1.0, last=0.5))
    assert report.main([write("new", now), "--against", old]) == 1
    text = capsys.readouterr().out
    assert "float32, full: seconds 1 -> 1.5" in text and "float32, last: peak bytes" in text


def test_a_file_that_is_no_result_is_named(write, tmp_path, capsys):
    def refused(*arguments: str) -> str:
        assert report.main(list(arguments)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "none.json" in refused(str(tmp_path / "none.json"))
    assert "no benchmark ran" in refused(write("empty"))
    for text in ("[]", "{}", '{"benchmarks": [1]}', '{"benchmarks": [{"extra_info": {}}]}'):
        (tmp_path / "wrong.json").write_text(text)
        assert "wrong.json" in refused(str(tmp_path / "wrong.json"))
    assert "wrong.json" in refused(write("wrong", {"contenders": {}}))
    files = write("a", step(1, 1.0, 1.0)), write("b", step(2, 1.0, 1.0))
    assert "no case in common" in refused(files[0], "--against", files[1])
    assert "at least 1" in refused(files[0], "--against", files[0], "--tolerance", "0.9")
