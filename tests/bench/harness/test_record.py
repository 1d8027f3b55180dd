"""What a record says of a time, and what the counters say of a step."""

import re

import pytest
import torch

from bench.harness import record
from bench.harness.record import Machine, Work, achieved, counted
from bench.harness.timing import matmul_ceiling, peak_of
from bench.harness.training import take_step, training
from bench.suites.bench_loom import plans
from deeploop.analyze.plan.memory import step_memory
from deeploop.config.presets import preset

CPU = torch.device("cpu")


def test_a_time_against_both_ceilings():
    # 100 GB and 3 TFLOP in 2 s, where 200 GB/s and 2 TFLOP/s are to be had.
    found = achieved(2.0, Work(100e9, 3e12, 5000), copy=200.0, matmul=2.0)
    assert found == {
        "gb_per_s": 50.0, "of_copy": 0.25, "tflop_per_s": 1.5, "of_matmul": 0.75,
        "of_floor": 0.75, "tokens_per_s": 2500.0,
    }  # fmt: skip


def test_a_work_without_flops_is_held_against_the_copy_alone():
    found = achieved(2.0, Work(100e9, None), copy=200.0, matmul=2.0)
    assert found["of_floor"] == 0.25
    assert found["tflop_per_s"] is found["of_matmul"] is found["tokens_per_s"] is None


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(record, "copy_bandwidth", lambda device: 10.0)
    monkeypatch.setattr(record, "matmul_ceiling", lambda device, dtype: 0.5)
    return Machine(CPU)


def test_a_record_is_whole(machine):
    x = torch.randn(64, 64)
    calls = {"ours": lambda: torch.add(x, x, out=torch.empty(64, 64)), "plain": lambda: x + x + x}
    entries = machine.compare(calls, {name: [x] for name in calls}, rounds=3, fused={})
    found = machine.record(
        "suite", {"n": 64}, torch.float32, Work(3 * x.nbytes, 4096), entries, ["plain", "absent"],
        {"absent": "not here"},
    )  # fmt: skip
    assert found["ours"] == ["ours"] and found["baselines"] == ["plain"]
    assert (found["copy_gb_per_s"], found["matmul_tflop_per_s"]) == (10.0, 0.5)
    for key in ("device", "processor", "torch", "triton", "python", "commit", "clocks"):
        assert key in found
    ours, plain = (found["contenders"][name] for name in ("ours", "plain"))
    # add reads x twice; it is counted by its arguments.
    assert ours["bytes"] == 3 * x.nbytes and plain["bytes"] == 6 * x.nbytes
    assert ours["peak_bytes"] == x.nbytes and plain["peak_bytes"] == 2 * x.nbytes
    assert ours["flops"] == plain["flops"] == 4096
    assert ours["of_copy"] == pytest.approx(3 * x.nbytes / ours["seconds"] / 10e9)


def test_work_may_differ_by_contender(machine):
    entries = {name: {"seconds": 1.0} for name in ("full", "last")}
    work = {"full": Work(1e9, 2e12), "last": Work(1e9, 1e12)}
    found = machine.record("s", {}, torch.float32, work, entries, ["full"], {}, ours=entries)
    assert [c["tflop_per_s"] for c in found["contenders"].values()] == [2.0, 1.0]
    assert found["ours"] == ["full", "last"] and found["baselines"] == ["full"]


def test_a_commit_may_be_given(monkeypatch):
    monkeypatch.setenv("DEEPLOOP_COMMIT", "abc123")
    assert record.commit() == "abc123"


def test_clocks_are_megahertz_or_nothing():
    for value in record.clocks(CPU).values():
        assert 100 < value < 10_000
    assert record.cpuinfo("no such field") == []


def test_the_matrix_ceiling_is_a_rate(monkeypatch):
    """2 n^3 over the median time."""
    monkeypatch.setattr(
        "bench.harness.timing.interleaved", lambda calls, **_: {name: [0.5] for name in calls}
    )
    assert matmul_ceiling(CPU, torch.float32) == pytest.approx(2 * 2048**3 / 0.5 / 1e12)


def test_held_tensors_are_no_peak():
    """A view of a weight names its storage; that was there before."""
    w, x = torch.randn(256, 256), torch.randn(8, 256)
    assert peak_of(lambda: x @ w.t(), [w, x]) == 8 * 256 * 4
    assert peak_of(lambda: x @ w.t()) > 256 * 256 * 4


def test_flops_of_products_and_of_elements():
    x, y = torch.randn(8, 4), torch.randn(4, 3)
    assert counted(lambda: x @ y, opened=True)[1] == 2 * 8 * 4 * 3
    assert counted(lambda: x.mul(2.0).sum(), opened=True)[1] == 32 + 32
    assert counted(lambda: x[0] + x, opened=True)[1] == 32
    assert counted(lambda: torch._foreach_addcdiv([x, x], [x, x], [x, x]), opened=True)[1] == 192
    assert counted(lambda: x.clone().to(torch.float64), opened=True)[1] == 0


def test_an_operator_of_ours_counts_as_one_where_it_is_not_opened():
    from deeploop.kernels import post_sandwich

    h, f = torch.randn(16, 32), torch.randn(16, 32)
    gains = torch.ones(32), torch.ones(32)
    closed = counted(lambda: post_sandwich(h, f, *gains, 1.5), opened=False)[0]
    least = 4 * h.nbytes
    assert least < closed < least + 1000  # and the gains and the statistics
    assert counted(lambda: post_sandwich(h, f, *gains, 1.5), opened=True)[0] > closed


@pytest.mark.parametrize("plan", ["full", "full, loop", "segments(2)"])
def test_a_steps_peak_is_what_fake_tensors_count(plan):
    config = preset("loom-tiny").replace("model", vocab_size=256, loops=4, seq_len=64)
    config = config.replace("train", batch_size=4, precision="fp32", **plans(4)[plan])
    there = training(config, CPU)
    take_step(there)
    found = peak_of(lambda: take_step(there), there.held()) + there.held_bytes()
    # The count also knows of what operators hold within themselves.
    counted = step_memory(config, "cpu", exact=True).held(4).peak
    assert found == pytest.approx(counted, rel=0.02)


def test_the_machine_names_its_processor():
    assert re.search(r"\w", record.processor()) or record.cpuinfo("model name") == []
