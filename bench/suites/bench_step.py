"""A whole training step by loops: the trainer's, and the one that one would write first.

    pytest bench/suites/bench_step.py -s [--benchmark-json=FILE]

The default model (on CUDA the paper's 124M one) at several R, with the residual rules deeploop
and pre_norm. Contenders start from the same weights and take the same batch, optimizer and
clipping:

* shipped: the trainer's step: autocast, closed-form or Triton updates, fused head and loss;
* eager: every norm written out (pow, mean, rsqrt, mul), all logits at once; under the same
  autocast;
* eager_fp32: the same in float32, where shipped computes in bfloat16 (not on CUDA);
* compile: eager with torch.compile of each visit (branch, residual rule, both norms) and of
  head and loss, one graph each, so that compile time does not grow with the loops. It takes
  part until DEEPLOOP_BENCH_COMPILE_SECONDS (60) are spent on compiling, and on a CPU only with
  DEEPLOOP_BENCH_COMPILE=1.

Before anything is timed, shipped and eager must agree in float32, and all first losses in the
precision they compute in. A contender that does not agree or runs out of memory is left out,
with its reason. FLOPs are the model's (`deeploop.model.flops`), bytes those that the operators
move; peak memory includes weights, moments and activations.
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
from bench.harness.training import Training, take_step, training
from deeploop.config import Config
from deeploop.config.presets import preset
from deeploop.config.presets.gpt2 import gpt2
from deeploop.model.attention import AttentionContext
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.train.step import apply_gradients
from deeploop.utils.device import autocast, computes_in_bf16, pick_device

DEVICE = pick_device("auto")
CUDA = DEVICE.type == "cuda"
LOOPS = (1, 3, 5, 7) if CUDA else (1, 2, 4, 8)
COMPILING = Budget(float(os.environ.get("DEEPLOOP_BENCH_COMPILE_SECONDS", "60")))
Step = Callable[[Training], torch.Tensor]
FUSED = {"deeploop": "post_sandwich", "pre_norm": "linear_update"}


def sized(residual: str, loops: int, cuda: bool = CUDA) -> Config:
    """Choose the model; on CUDA the batch is small, for the written-out norms at the most loops."""
    if cuda:
        config = gpt2("small", loops, residual)
        return config.replace("train", batch_size=8, micro_batch=0, precision="bf16")
    config = preset("deeploop-tiny").replace(
        "model", vocab_size=256, residual=residual, loops=loops
    )
    return config.replace("train", precision="bf16" if computes_in_bf16(DEVICE) else "fp32")


def norm_chain(x, gain, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


def eager_visit(branch, h, n, context, gain_out, gain_next, alpha, eps):
    f = branch(n, context)
    h = h + f if gain_out is None else norm_chain(alpha * h + f, gain_out, eps)
    return h, norm_chain(h, gain_next, eps)


def head_loss(n, head, targets):
    logits = F.linear(n, head)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


class EagerFunctions(NamedTuple):
    """The two functions of an eager step, as they are or compiled."""

    visit: Callable = eager_visit
    loss: Callable = head_loss


EAGER = EagerFunctions()


def eager_loss(model: LoopLM, tokens, targets, eager: EagerFunctions = EAGER):
    """Compute the mean loss with every norm written out: the same function as the shipped one."""
    config, eps = model.config, model.config.norm_eps
    h = norm_chain(model.embed_tokens(tokens), model.norm_embed.weight, eps)
    first, *_ = sublayers = model.sublayers
    n = norm_chain(h, first.gain_in, eps)
    context = AttentionContext(*model.rope(tokens, None, n.dtype), 0)
    for loop in range(config.loops):
        after_loop = model.final_gain if loop + 1 == config.loops else first.gain_in
        gains_next = [*(s.gain_in for s in sublayers[1:]), after_loop]
        for s, gain_next in zip(sublayers, gains_next, strict=True):
            h, n = eager.visit(s.branch, h, n, context, s.gain_out, gain_next, config.alpha, eps)
    return eager.loss(n, model.head, targets)


def eager_step(t: Training, precision: str, eager: EagerFunctions = EAGER) -> torch.Tensor:
    with autocast(t.tokens.device, precision):
        loss = eager_loss(t.model, t.tokens, t.targets, eager)
    loss.backward()
    apply_gradients(t.model, t.optimizer, t.config.train.clip, t.config.train.lr)
    return loss.detach()


def check(t: Training) -> None:
    """Compare the shipped and the eager loss in float32."""
    with torch.no_grad():
        n = t.model(t.tokens)
        shipped = linear_cross_entropy(n, t.model.head, t.targets) / t.targets.numel()
        torch.testing.assert_close(
            shipped, eager_loss(t.model, t.tokens, t.targets), rtol=1e-4, atol=1e-5
        )


def steps_by_contender(precision: str, missing: dict[str, str]) -> dict[str, Step]:
    """Make each contender's step; `missing` gets the reason for leaving out compile."""
    steps: dict[str, Step] = {
        "shipped": lambda t: take_step(t),
        "eager": lambda t: eager_step(t, precision),
    }
    if precision == "bf16" and not CUDA:
        steps["eager_fp32"] = lambda t: eager_step(t, "fp32")
    refused = not_compiling(DEVICE, COMPILING)
    if refused:
        missing["compile"] = refused
    else:
        torch._dynamo.reset()  # each R has another alpha; the number of recompilations is limited
        compiled = EagerFunctions(*(torch.compile(f, fullgraph=True) for f in EAGER))
        steps["compile"] = lambda t: eager_step(t, precision, compiled)
    return steps


def contenders(config: Config, missing: dict[str, str]) -> dict[str, tuple[Step, Training]]:
    """Take each contender's first step; returns those that run here and whose loss is right."""
    result = {}
    for name, step in steps_by_contender(config.train.precision, missing).items():
        t = training(config, DEVICE)
        try:
            with COMPILING.spend() if name == "compile" else contextlib.nullcontext():
                loss = step(t)
        except Exception as error:
            if name == "shipped":
                raise
            missing[name] = in_words(error)
            continue
        if name == "shipped":
            expected = loss
        error = relative_error(loss, expected)
        if error < 1e-2:  # rounding of bfloat16; False for NaN
            result[name] = step, t
        else:
            assert name != "shipped", f"loss {loss.item()}"
            missing[name] = f"its first loss is off by {error:.1e}"
    return result


@pytest.mark.parametrize("loops", LOOPS)
@pytest.mark.parametrize("residual", ["deeploop", "pre_norm"])
def test_training_step(benchmark, machine, residual, loops):
    config, missing = sized(residual, loops), {}
    check(training(config, DEVICE))
    running = contenders(config, missing)
    calls = {name: lambda step=step, t=t: step(t) for name, (step, t) in running.items()}
    existing = {name: t.tensors() for name, (_, t) in running.items()}
    fused = {"shipped": (f"{FUSED[residual]}_forward", f"{FUSED[residual]}_backward")}
    entries = machine.compare(calls, existing, rounds=15 if CUDA else 5, fused=fused)
    for name, entry in entries.items():
        if entry["peak_bytes"] is not None:
            entry["peak_bytes"] += running[name][1].nbytes()
    shipped = running["shipped"][1]
    case = {
        "residual": residual,
        "loops": loops,
        "model": config.preset,
        "batch": len(shipped.tokens),
    }
    others = [name for name in entries if name != "shipped"]
    benchmark.extra_info |= machine.record(
        "step", case, shipped.dtype, shipped.work(), entries, others, missing
    )
    print(f"\n{one_line(benchmark.extra_info)}")
    benchmark.pedantic(calls["shipped"], rounds=1)
