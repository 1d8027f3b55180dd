"""On a CUDA device: the models are those of the CPU, and a training step waits for nothing."""

import copy
import io

import pytest
import torch
from rich.console import Console

from deeploop.analyze.diagnose.diagnostics import Batch, as_figures, measure_state
from deeploop.config import Config, TrainConfig
from deeploop.config.backprop import segments
from deeploop.model.looplm import LoopLM
from deeploop.train.backprop import MicroBatch, run_segment
from deeploop.train.optim import make_optimizer
from deeploop.train.setup import open_run
from deeploop.utils.device import autocast
from tests.helpers.loom_cases import small

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

READINGS = {"paper": {}, "released": {"global_source": "readout", "carry": "normalised"}}


def pair(loom=None, residual="loom", **moe):
    """The same model on the CPU and on the GPU, and a batch."""
    sizes = {"experts": 8, "top_k": 2, "d_expert": 32, "shared": 1, "capacity_factor": 1.0}
    torch.manual_seed(0)
    model = LoopLM(small(loom=loom, moe=sizes | moe, residual=residual, d_model=64))
    x = torch.randint(0, 31, (4, 16), generator=torch.Generator().manual_seed(1))
    return model, copy.deepcopy(model).cuda(), x


def gradients(model, x, **train):
    config = Config(model=model.config, train=TrainConfig(batch_size=4, **train))
    state = None
    for segment in segments(config.train, model.config.loops):
        result = run_segment(model, config, segment, MicroBatch(x, x), state, None)
        state = result.state
    return result.loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("plan", ["full", "segments"])
def test_float32_is_the_cpus(reading, plan):
    cpu, gpu, x = pair(READINGS[reading])
    loss, wanted = gradients(cpu, x, backprop=plan, backprop_loops=2, precision="fp32")
    found, ours = gradients(gpu, x.cuda(), backprop=plan, backprop_loops=2, precision="fp32")
    torch.testing.assert_close(found.cpu(), loss, rtol=1e-4, atol=1e-5)
    for name, grad in wanted.items():
        error = (ours[name].cpu() - grad).norm() / grad.norm().clamp_min(1e-6)
        assert error < 1e-2, f"{name}: {error:.1e}"  # TF32 off by default; few ties either way


@pytest.mark.parametrize("residual", ["loom", "deeploop", "pre_norm"])
def test_bfloat16_is_near_float32(residual):
    cpu, gpu, x = pair(residual=residual, capacity_factor=0.0)
    exact = cpu.logits(cpu(x))
    with torch.no_grad(), autocast(torch.device("cuda"), "bf16"):
        n = gpu(x.cuda())
        low = gpu.logits(n).float().cpu()
    assert n.dtype == torch.bfloat16
    assert (low - exact).square().mean() / exact.square().mean() < 5e-3


@pytest.mark.parametrize("recompute", ["visit", "loop"])
def test_recomputing_gives_the_same_bits(recompute):
    _, model, x = pair()
    _, kept = gradients(model, x.cuda(), precision="bf16")
    kept = {n: g.clone() for n, g in kept.items()}
    model.zero_grad(set_to_none=True)
    _, again = gradients(model, x.cuda(), precision="bf16", recompute=recompute)
    for name, grad in kept.items():
        assert torch.equal(grad, again[name]), name


def test_two_runs_are_the_same_bits():
    _, model, x = pair()
    first = {n: g.clone() for n, g in gradients(model, x.cuda(), precision="bf16")[1].items()}
    model.zero_grad(set_to_none=True)
    for name, grad in gradients(model, x.cuda(), precision="bf16")[1].items():
        assert torch.equal(grad, first[name]), name


def test_a_step_waits_for_nothing(config):
    """Router, sort, experts, balance, clip and optimizer: no value is read back."""
    model = small(
        moe={"experts": 8, "d_expert": 32, "capacity_factor": 1.0}, d_model=64, vocab_size=0
    )
    config = config.replace("model", **vars(model))
    config = config.replace("train", device="cuda", precision="bf16", backprop="segments")
    trainer = open_run(config, Console(file=io.StringIO()))
    trainer.step(observe=False)  # what is made once may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(observe=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_segments_hold_less_than_full_backprop():
    _, model, x = pair()
    x, peaks = x.cuda(), {}
    for plan in ("segments", "full"):
        model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients(model, x, backprop=plan, backprop_loops=1, precision="bf16")
        peaks[plan] = torch.cuda.max_memory_allocated() - before
    assert peaks["segments"] < peaks["full"]


@pytest.mark.parametrize("residual", ["loom", "deeploop"])
def test_a_diagnosis_is_the_cpus(residual):
    *models, x = pair(residual=residual)
    config = Config(model=models[0].config, train=TrainConfig(batch_size=4))
    found = []
    for model, tokens in zip(models, (x, x.cuda()), strict=True):
        batch = Batch(tokens, tokens, probes=2, seed=0)
        measured = measure_state(model, make_optimizer(model, config.train), config, 0, batch)
        found.append(as_figures(measured, config, 0))
    cpu, gpu = found
    for key in ("loss", "kappa", "kappa_directional", "cosine", "c_u", "c_g"):
        assert gpu[key] == pytest.approx(cpu[key], rel=1e-3)
    assert gpu["update"] == pytest.approx(cpu["update"], rel=1e-2)
