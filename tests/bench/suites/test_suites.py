"""The suites time contenders that agree, and count their work."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.harness.record import counted
from bench.harness.training import take_step, training
from bench.suites import bench_decode, bench_loom, bench_moe, bench_optimizer, bench_step
from deeploop.config.presets import preset
from deeploop.eval.generate import sample
from deeploop.model.looplm import LoopLM

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sized for a CPU")
CPU = torch.device("cpu")


def small(residual: str = "deeploop"):
    config = preset("deeploop-tiny").replace(
        "model", vocab_size=64, residual=residual, loops=3, seq_len=16
    )
    return config.replace("train", batch_size=2, precision="fp32")


@pytest.mark.parametrize("residual", ["deeploop", "pre_norm"])
def test_shipped_and_eager_steps_give_the_same_weights(residual):
    a, b = (training(small(residual), CPU) for _ in range(2))
    bench_step.check(a)
    torch.testing.assert_close(take_step(a), bench_step.eager_step(b, "fp32"))
    for ours, eager in zip(a.model.parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-3, atol=1e-4)
    assert bench_step.sized(residual, 7, cuda=True).model.residual == residual


@pytest.mark.parametrize("wrong", [False, True])
def test_a_step_with_another_loss_is_left_out(monkeypatch, wrong):
    monkeypatch.delenv("DEEPLOOP_BENCH_COMPILE", raising=False)
    if wrong:
        monkeypatch.setattr(bench_step, "eager_step", lambda t, precision: torch.tensor(1.0))
    missing = {}
    running = bench_step.contenders(small(), missing)
    assert set(running) == ({"shipped"} if wrong else {"shipped", "eager"})
    assert set(missing) == ({"compile", "eager"} if wrong else {"compile"})
    assert not wrong or "off by" in missing["eager"]


def test_every_setting_of_backprop_steps_and_counts_its_flops():
    config = preset("loom-tiny").replace("model", vocab_size=64, loops=4, seq_len=16)
    config = config.replace("train", batch_size=2, precision="fp32")
    missing = {}
    running = bench_loom.contenders(training(config, CPU), missing)
    assert not missing and set(running) == {
        "full", "full, visit", "full, loop", *(f"segments({k})" for k in (1, 2, 3)),
        "last(1)", "last(3)",
    }  # fmt: skip
    flops = {name: run.work().flops for name, run in running.items()}
    assert flops["last(1)"] < flops["last(3)"] < flops["full"] == flops["full, loop"]
    assert flops["full"] < flops["segments(2)"] < flops["segments(1)"]
    floors = {name: run.work().floor_bytes for name, run in running.items()}
    assert floors["segments(1)"] == 4 * floors["full"]


def test_a_wrong_optimizer_is_left_out(monkeypatch):
    wrong = {"foreach": lambda model: bench_optimizer.torchs(model.embed_tokens, True)}
    monkeypatch.setattr(bench_optimizer, "CONTENDERS", bench_optimizer.CONTENDERS | wrong)
    missing = {}
    assert set(bench_optimizer.built("loom-tiny", missing)) == {"shipped", "single"}
    assert "weights are off" in missing["foreach"] and "apex" in missing


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
    work = bench_decode.work(model, 2)
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.1)
    assert work.tokens == 2 * bench_decode.NEW


def test_flops_of_experts_are_those_of_their_products(monkeypatch):
    for name, value in {"D_MODEL": 64, "D_EXPERT": 64, "EXPERTS": 8, "TOP_K": 3}.items():
        monkeypatch.setattr(bench_moe, name, value)
    layers = bench_moe.layers("fp32", {})
    assert {"grouped_mm", "loop", "modules"} == set(layers)
    h = torch.randn(256, 64)
    inputs, gradients = (h, h.clone().requires_grad_()), (h, h, torch.ones(()))
    visit, layer = layers["modules"]
    flops = counted(lambda: bench_moe.step(visit, layer, inputs, gradients, "fp32"), opened=True)[1]
    assert bench_moe.work(256, 4).flops == pytest.approx(flops, rel=0.1)
