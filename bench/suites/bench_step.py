"""A whole training step by loops: as shipped, and as one would write it first.

    pytest bench/suites/bench_step.py -s [--benchmark-json=FILE]

The default model (on CUDA the paper's 124M one) at several R, both residuals. Contenders start
from the same weights and take the same batch, optimizer and clipping:

* shipped: the trainer's step: autocast, closed-form or Triton updates, fused head loss;
* eager: every norm written out as one writes it (pow, mean, rsqrt, mul), all logits at
  once; under the same autocast;
* eager_fp32: the same in float32, where shipped computes in bfloat16 (not on CUDA);
* compile: eager with torch.compile of each visit (branch, residual rule, both norms) and of
  head and loss, one graph each, so that building does not grow with the loops; built while
  the seconds of DEEPLOOP_BENCH_COMPILE_SECONDS (60) last, on a CPU only with
  DEEPLOOP_BENCH_COMPILE=1.

Shipped and eager must agree in float32, and all first losses in what they compute in,
before anything is timed. One that does not, or runs out of memory, is named. FLOPs are the
model's (`deeploop.model.flops`), bytes those that the operators move; peak memory has weights,
moments and activations.
"""

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from bench.harness.record import one_line
from bench.harness.timing import Budget, in_words, not_compiling, relative_error
from bench.harness.training import Training, optimize, take_step, training
from deeploop.config import Config
from deeploop.config.presets import preset
from deeploop.model.attention import AttentionContext
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.model.visits import walk
from deeploop.utils.device import autocast, computes_in_bf16, pick_device

DEVICE = pick_device("auto")
CUDA = DEVICE.type == "cuda"
LOOPS = (1, 3, 5, 7) if CUDA else (1, 2, 4, 8)
COMPILING = Budget(float(os.environ.get("DEEPLOOP_BENCH_COMPILE_SECONDS", "60")))
FUSED = {"deeploop": "post_sandwich", "pre_norm": "linear_update"}


def sized(residual: str, loops: int) -> Config:
    """On CUDA so few sequences that the written-out norms have room at the most loops."""
    if CUDA:
        config = preset(f"gpt2-small-r{loops}-{residual}")
        return config.replace("train", batch_size=8, micro_batch=0, precision="bf16")
    config = preset("deeploop-tiny").replace(
        "model", vocab_size=256, residual=residual, loops=loops
    )
    return config.replace("train", precision="bf16" if computes_in_bf16(DEVICE) else "fp32")


def norm_chain(x, gain, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def eager_visit(branch, h, n, place, gain_out, gain_next, alpha, eps):
    f = branch(n, place)
    h = h + f if gain_out is None else norm_chain(alpha * h + f, gain_out, eps)
    return h, norm_chain(h, gain_next, eps)


def head_loss(n, head, targets):
    logits = F.linear(n, head)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


class Pieces(NamedTuple):
    """The functions that an eager step is made of."""

    visit: Callable = eager_visit
    loss: Callable = head_loss


def eager_loss(model: LoopLM, tokens, targets, pieces=Pieces()):  # noqa: B008
    """The walk with every norm written out; the same function as the shipped one."""
    config, eps = model.config, model.config.norm_eps
    h = norm_chain(model.embedding(tokens), model.gain_embedding, eps)
    n = norm_chain(h, model.sublayers[0].gain_in, eps)
    place = AttentionContext(model.cos, model.sin, 0)
    for loop in range(config.loops):
        last = loop + 1 == config.loops
        for visit in walk(config, model.sublayers, loop, last, model.gain_final):
            there = visit.sublayer
            h, n = pieces.visit(
                there.branch, h, n, place, there.gain_out, visit.gain_next, config.alpha, eps
            )
    return pieces.loss(n, model.head, targets)


def eager_step(t: Training, precision: str, pieces=Pieces()) -> torch.Tensor:  # noqa: B008
    with autocast(t.tokens.device, precision):
        value = eager_loss(t.model, t.tokens, t.targets, pieces)
    value.backward()
    optimize(t)
    return value.detach()


def check(t: Training) -> None:
    """Both losses are one function, in float32."""
    with torch.no_grad():
        n = t.model(t.tokens)
        shipped = linear_cross_entropy(n, t.model.head, t.targets) / t.targets.numel()
        torch.testing.assert_close(
            shipped, eager_loss(t.model, t.tokens, t.targets), rtol=1e-4, atol=1e-5
        )


def contenders(config: Config, missing: dict[str, str]):
    """Each one's step and training, those that run here."""
    precision = config.train.precision
    wanted = {
        "shipped": lambda t: take_step(t),
        "eager": lambda t: eager_step(t, precision),
    }
    if precision == "bf16" and not CUDA:
        wanted["eager_fp32"] = lambda t: eager_step(t, "fp32")
    refused = not_compiling(DEVICE, COMPILING)
    if refused:
        missing["compile"] = refused
    else:
        torch._dynamo.reset()  # each R is another alpha; there is a limit on those
        pieces = Pieces(*(torch.compile(piece, fullgraph=True) for piece in Pieces()))
        wanted["compile"] = lambda t: eager_step(t, precision, pieces)
    found, expected = {}, torch.zeros(())
    for name, step in wanted.items():
        there = training(config, DEVICE)
        try:
            with COMPILING.spend() if name == "compile" else contextlib.nullcontext():
                loss = step(there)
        except Exception as error:
            if name == "shipped":
                raise
            missing[name] = in_words(error)
            continue
        expected = loss if name == "shipped" else expected
        error = relative_error(loss, expected)
        if error < 1e-2:  # of bfloat16; NaN is no less
            found[name] = step, there
        else:
            assert name != "shipped", f"loss {loss.item()}"
            missing[name] = f"its first loss is off by {error:.1e}"
    return found


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("residual", ["deeploop", "pre_norm"])
def test_training_step(benchmark, machine, residual, loops):
    config, missing = sized(residual, loops), {}
    check(training(config, DEVICE))
    found = contenders(config, missing)
    calls = {name: lambda f=f, t=t: f(t) for name, (f, t) in found.items()}
    held = {name: t.held() for name, (_, t) in found.items()}
    fused = {"shipped": (f"{FUSED[residual]}_forward", f"{FUSED[residual]}_backward")}
    entries = machine.compare(calls, held, rounds=15 if CUDA else 5, fused=fused)
    for name, entry in entries.items():
        if entry["peak_bytes"] is not None:
            entry["peak_bytes"] += found[name][1].held_bytes()
    there = found["shipped"][1]
    case = {
        "residual": residual,
        "loops": loops,
        "model": config.preset,
        "batch": len(there.tokens),
    }
    others = [name for name in entries if name != "shipped"]
    benchmark.extra_info |= machine.record(
        "step", case, there.dtype, there.work(), entries, others, missing
    )
    print(f"\n{one_line(benchmark.extra_info)}")
    benchmark.pedantic(calls["shipped"], rounds=1)
