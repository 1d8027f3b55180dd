"""Records: a time against the ceilings, and the counts of a step."""

import pytest
import torch

from bench.harness import record
from bench.harness.record import Machine, Work, achieved, counted
from bench.harness.timing import matmul_ceiling, peak_of
from bench.harness.training import take_step, training
from bench.suites.bench_loom import settings
from deeploop.analyze.plan.memory import step_memory
from deeploop.config.presets import preset
from deeploop.kernels import post_sandwich

CPU = torch.device("cpu")


def test_a_time_against_both_ceilings():
    # 100 GB and 3 TFLOP in 2 s, under ceilings of 200 GB/s and 2 TFLOP/s.
    assert achieved(2.0, Work(100e9, 3e12, 5000), copy=200.0, matmul=2.0) == {
        "gb_per_s": 50.0, "of_copy": 0.25, "tflop_per_s": 1.5, "of_matmul": 0.75,
        "of_floor": 0.75, "tokens_per_s": 2500.0,
    }  # fmt: skip
    without_flops = achieved(2.0, Work(100e9, None), copy=200.0, matmul=2.0)
    assert without_flops["of_floor"] == 0.25 and without_flops["of_matmul"] is None


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(record, "copy_bandwidth", lambda device: 10.0)
    monkeypatch.setattr(record, "matmul_ceiling", lambda device, dtype: 0.5)
    return Machine(CPU)


def test_a_record_is_complete(machine):
    x = torch.randn(64, 64)
    calls = {"ours": lambda: torch.add(x, x, out=torch.empty(64, 64)), "plain": lambda: x + x + x}
    entries = machine.compare(calls, {name: [x] for name in calls}, rounds=3, fused={})
    case = machine.record(
        "suite", {"n": 64}, torch.float32, Work(3 * x.nbytes, 4096), entries, ["plain", "absent"],
        {"absent": "not installed"},
    )  # fmt: skip
    assert case["ours"] == ["ours"] and case["baselines"] == ["plain"]
    assert (case["copy_gb_per_s"], case["matmul_tflop_per_s"]) == (10.0, 0.5)
    for key in ("device", "processor", "torch", "triton", "python", "commit", "clocks"):
        assert key in case
    ours, plain = (case["contenders"][name] for name in ("ours", "plain"))
    # x + x reads x twice: arguments are counted, not storages.
    assert ours["bytes"] == 3 * x.nbytes and plain["bytes"] == 6 * x.nbytes
    assert ours["peak_bytes"] == x.nbytes and plain["peak_bytes"] == 2 * x.nbytes
    assert ours["of_copy"] == pytest.approx(3 * x.nbytes / ours["seconds"] / 10e9)


def test_work_may_differ_by_contender(machine):
    entries = {name: {"seconds": 1.0} for name in ("full", "last")}
    work = {"full": Work(1e9, 2e12), "last": Work(1e9, 1e12)}
    case = machine.record("s", {}, torch.float32, work, entries, ["full"], {}, ours=entries)
    assert [c["tflop_per_s"] for c in case["contenders"].values()] == [2.0, 1.0]
    assert case["ours"] == ["full", "last"] and case["baselines"] == ["full"]


def test_the_commit_can_be_given(monkeypatch):
    monkeypatch.setenv("DEEPLOOP_COMMIT", "abc123")
    assert record.commit() == "abc123"


def test_the_matrix_ceiling_divides_flops_by_the_median_time(monkeypatch):
    monkeypatch.setattr(
        "bench.harness.timing.interleaved", lambda calls, **_: {name: [0.5] for name in calls}
    )
    assert matmul_ceiling(CPU, torch.float32) == pytest.approx(2 * 2048**3 / 0.5 / 1e12)


def test_existing_tensors_do_not_count_as_peak():
    """A view of a weight names the weight's storage."""
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


def test_an_op_that_is_not_opened_reads_its_inputs_and_writes_its_outputs():
    h, f, gains = torch.randn(16, 32), torch.randn(16, 32), (torch.ones(32), torch.ones(32))
    closed = counted(lambda: post_sandwich(h, f, *gains, 1.5), opened=False)[0]
    assert 4 * h.nbytes < closed < 4 * h.nbytes + 1000  # with the gains and the statistics
    assert counted(lambda: post_sandwich(h, f, *gains, 1.5), opened=True)[0] > closed


@pytest.mark.parametrize("backprop", ["full", "full, loop", "segments(2)"])
def test_the_peak_of_a_step_is_the_one_that_the_planner_counts(backprop):
    config = preset("loom-tiny").replace("model", vocab_size=256, loops=3, seq_len=64)
    config = config.replace("train", batch_size=4, precision="fp32", **settings(3)[backprop])
    t = training(config, CPU)
    take_step(t)
    peak = peak_of(lambda: take_step(t), t.tensors()) + t.nbytes()
    # The planner also knows the memory that operators use within themselves.
    assert peak == pytest.approx(step_memory(config, "cpu", exact=True).at(4).peak, rel=0.02)
