"""A whole training step of the default model: as shipped, and as one would write it first.

    pytest bench/bench_step.py

Contenders share weights, data, loss and optimizer, and differ in what a step
runs: ours is the shipped path (bfloat16 autocast where the CPU computes in it,
closed-form updates, fused head loss); `eager` is float32 with the norms written
out as one writes them (pow, mean, rsqrt, mul) and plain cross-entropy.
"""

import itertools
import statistics

import pytest
import torch
import torch.nn.functional as F

from bench.timing import interleaved, ratio
from deeploop.device import computes_in_bf16, device_name, pick_device
from deeploop.evaluate import autocast
from deeploop.layers import Place
from deeploop.lm import LoopLM
from deeploop.loss import linear_cross_entropy
from deeploop.optim import adamw, clip_gradients, step_if_finite
from deeploop.presets import preset
from deeploop.visits import walk


def norm_chain(x, gain, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def eager_loss(model: LoopLM, tokens, targets):
    """The walk with every norm written out; the same function as the shipped one."""
    config, eps = model.config, model.config.norm_eps
    h = norm_chain(model.embedding(tokens), model.gain_embedding, eps)
    n = norm_chain(h, model.sublayers[0].gain_in, eps)
    loops = range(config.loops)
    visits = (
        walk(config, model.sublayers, t, t + 1 == len(loops), model.gain_final) for t in loops
    )
    for visit in itertools.chain.from_iterable(visits):
        f = visit.branch(n, Place(model.cos, model.sin, 0))
        if visit.sublayer.gain_out is None:
            h = h + f
        else:
            h = norm_chain(config.alpha * h + f, visit.sublayer.gain_out, eps)
        n = norm_chain(h, visit.gain_next, eps)
    logits = model.logits(n)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def shipped_loss(model: LoopLM, tokens, targets, precision):
    with autocast(tokens.device, precision):
        n = model(tokens)
        return linear_cross_entropy(n, model.embedding.weight, targets) / targets.numel()


def trainable(config, device):
    torch.manual_seed(0)
    model = LoopLM(config.model).to(device)
    return model, adamw(model, config.train)


def take_step(model, optimizer, loss):
    loss.backward()
    step_if_finite(optimizer, clip_gradients(model, 1.0), 1e-4)
    optimizer.zero_grad(set_to_none=True)


@pytest.mark.parametrize("arm", ["deeploop", "baseline"])
def test_training_step(benchmark, arm):
    device = pick_device("auto")
    tiny = preset("deeploop-tiny")
    config = tiny.replace("model", vocab_size=256, arm=arm)
    tokens = torch.randint(0, 256, (config.train.batch_size, config.model.seq_len), device=device)
    ours, eager = trainable(config, device), trainable(config, device)
    precision = "bf16" if computes_in_bf16(device) else "fp32"
    exact = eager_loss(eager[0], tokens, tokens)
    torch.testing.assert_close(shipped_loss(ours[0], tokens, tokens, "fp32"), exact)

    def step_ours():
        take_step(*ours, shipped_loss(ours[0], tokens, tokens, precision))

    def step_eager():
        take_step(*eager, eager_loss(eager[0], tokens, tokens))

    times = interleaved({"ours": step_ours, "eager": step_eager})
    benchmark.extra_info |= {
        "device": device_name(device),
        "precision": precision,
        "tokens_per_second": {
            name: tokens.numel() / statistics.median(seconds) for name, seconds in times.items()
        },
        "ours_over_eager": ratio(times, "eager", "ours"),
    }
    print(f"\n{arm}: {benchmark.extra_info}")
    benchmark.pedantic(step_ours, rounds=3)
