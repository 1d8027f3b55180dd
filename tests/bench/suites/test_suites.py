"""The suites time steps that are right: the trainer's own, and contenders that agree."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.harness.record import counted
from bench.harness.training import Training, take_step, training
from bench.suites import bench_decode, bench_loom, bench_moe, bench_optimizer, bench_step
from deeploop.config.presets import preset
from deeploop.eval.generate import sample
from deeploop.model.looplm import LoopLM
from deeploop.train.setup import open_run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sized for a CPU")
CPU = torch.device("cpu")


@pytest.mark.parametrize("step_per", ["segment", "batch"])
def test_a_step_of_the_bench_is_the_trainers(config, quiet, step_per):
    """To the bit: weights, moments and the biases of the experts."""
    moe = {"experts": 4, "top_k": 2, "shared": 1}
    config = config.replace("model", residual="loom", loops=4, embed_std=0.25)
    config = config.replace("model.moe", **moe)
    config = config.replace(
        "train", backprop="segments", backprop_loops=2, step_per=step_per, warmup=0.0, batch_size=4
    )
    trainer = open_run(config, quiet)
    there = training(trainer.config, CPU)
    there.model.load_state_dict(trainer.model.state_dict())
    tokens, targets = trainer.batch()
    with trainer.lock:
        trainer.step(observe=False)
    take_step(Training(there.config, there.model, there.optimizer, tokens, targets))
    expected = trainer.model.state_dict()
    for name, value in there.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    biases = [v for name, v in expected.items() if name.endswith("bias")]
    assert biases and all(b.any() for b in biases)


def small(residual: str = "deeploop", **train):
    config = preset("deeploop-tiny").replace(
        "model", vocab_size=64, residual=residual, loops=3, seq_len=16
    )
    return config.replace("train", batch_size=2, precision="fp32", **train)


@pytest.mark.parametrize("residual", ["deeploop", "pre_norm"])
def test_shipped_and_eager_steps_give_the_same_weights(residual):
    a, b = (training(small(residual), CPU) for _ in range(2))
    bench_step.check(a)
    torch.testing.assert_close(take_step(a), bench_step.eager_step(b, "fp32"))
    for ours, eager in zip(a.model.parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)


def test_contenders_of_a_step_are_there_or_named(monkeypatch):
    monkeypatch.delenv("DEEPLOOP_BENCH_COMPILE", raising=False)
    missing = {}
    found = bench_step.contenders(small(), missing)
    assert set(found) == {"shipped", "eager"} and set(missing) == {"compile"}


def test_a_step_that_computes_another_loss_is_left_out(monkeypatch):
    monkeypatch.delenv("DEEPLOOP_BENCH_COMPILE", raising=False)
    monkeypatch.setattr(bench_step, "eager_step", lambda t, precision: torch.tensor(1.0))
    missing = {}
    assert set(bench_step.contenders(small(), missing)) == {"shipped"}
    assert "off by" in missing["eager"]


def test_every_plan_under_its_loops():
    assert "segments(3)" not in bench_loom.plans(3) and "segments(2)" in bench_loom.plans(3)
    assert set(bench_loom.plans(12)) == {
        "full", "full, visit", "full, loop", *(f"segments({k})" for k in (1, 2, 3, 4, 6)),
        "last(1)", "last(3)",
    }  # fmt: skip


def test_every_plan_steps_and_counts_its_own_flops():
    config = preset("loom-tiny").replace("model", vocab_size=64, loops=4, seq_len=16)
    config = config.replace("train", batch_size=2, precision="fp32")
    missing = {}
    found = bench_loom.runs(training(config, CPU), missing)
    assert set(found) == set(bench_loom.plans(4)) and not missing
    flops = {name: run.work().flops for name, run in found.items()}
    assert flops["last(1)"] < flops["last(3)"] < flops["full"] == flops["full, loop"]
    assert flops["full"] < flops["segments(2)"] < flops["segments(1)"]
    floors = {name: run.work().floor_bytes for name, run in found.items()}
    assert floors["segments(1)"] == 4 * floors["full"]


def test_plans_are_timed_where_full_backprop_has_no_room(monkeypatch):
    def short_of_memory(run):
        if run.config.train.backprop == "full":
            raise torch.OutOfMemoryError("no room")
        return torch.tensor(1.0)

    monkeypatch.setattr(bench_loom, "take_step", short_of_memory)
    kept, timed = {}, []
    machine = SimpleNamespace(
        compare=lambda calls, *_, **__: {name: {"seconds": 1.0, "peak_bytes": 0} for name in calls},
        record=lambda *a, **__: {"suite": a[0], "case": a[1], "contenders": a[4], "missing": a[6]},
    )
    benchmark = SimpleNamespace(extra_info=kept, pedantic=lambda call, rounds: timed.append(call))
    bench_loom.test_plans(benchmark, machine, 3)
    assert set(kept["missing"]) == set(bench_loom.FULL) and len(timed) == 1


def test_optimizers_agree_or_are_named():
    missing = {}
    found = bench_optimizer.built("loom-tiny", missing)
    assert {"shipped", "foreach", "single"} == set(found) and set(missing) == {"apex"}


def test_a_wrong_optimizer_is_told(monkeypatch):
    wrong = {"foreach": lambda model: bench_optimizer.torchs(model.embed_tokens, True)}
    monkeypatch.setattr(bench_optimizer, "CONTENDERS", bench_optimizer.CONTENDERS | wrong)
    missing = {}
    assert "foreach" not in bench_optimizer.built("loom-tiny", missing)
    assert "weights are off" in missing["foreach"]


def test_decoding_with_and_without_a_cache():
    torch.manual_seed(0)
    sizes = {"seq_len": 128, "n_layers": 1, "loops": 2, "vocab_size": 4096}  # head as large as body
    model = LoopLM(small().replace("model", **sizes).model).eval()
    prompt = torch.randint(0, 4096, (2, bench_decode.PROMPT))
    tokens = bench_decode.recomputed(model, prompt, bench_decode.NEW)
    bench_decode.check(model, tokens)
    assert torch.equal(tokens, sample(model, prompt, bench_decode.NEW, temperature=0))
    with FlopCounterMode(display=False) as counter:
        sample(model, prompt, bench_decode.NEW, temperature=0)
    found = bench_decode.work(model, 2)
    assert found.flops == pytest.approx(counter.get_total_flops(), rel=0.1)
    assert found.tokens == 2 * bench_decode.NEW


def test_flops_of_experts_are_those_of_their_products(monkeypatch):
    for name, value in {"D_MODEL": 64, "D_EXPERT": 64, "EXPERTS": 8, "TOP_K": 3}.items():
        monkeypatch.setattr(bench_moe, name, value)
    there = bench_moe.layers("fp32", {})
    assert {"grouped_mm", "loop", "modules"} == set(there)
    h = torch.randn(256, 64)
    inputs, gradients = (h, h.clone().requires_grad_()), (h, h, torch.ones(()))
    visit, layer = there["modules"]
    found = counted(lambda: bench_moe.step(visit, layer, inputs, gradients, "fp32"), opened=True)
    assert bench_moe.work(256, 4).flops == pytest.approx(found[1], rel=0.1)
