"""An optimizer step with its clipping, on the parameters of real models.

    pytest bench/suites/bench_optimizer.py -s [--benchmark-json=FILE]

`deeploop-tiny` and `loom-tiny` on a CPU, the 124M model and `loom-329m` on CUDA, float32.
Contenders start from the same weights and gradients and decay the same groups:

* shipped: `clip_gradients` and fused AdamW, skipped on the device if the norm is not finite;
* foreach, single: torch's AdamW over lists of tensors, and tensor by tensor, after
  `clip_grad_norm_`;
* apex: NVIDIA's FusedAdam after the same clipping, on CUDA where it imports.

After two steps the weights of all must agree; one that does not is left out, with its reason.
The floor reads each gradient for the norm, then weight, gradient and both moments, and writes
all but the gradient; FLOPs are those of `single`.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from bench.harness.record import Work, counted, one_line
from bench.harness.timing import in_words, relative_error
from deeploop.config import TrainConfig
from deeploop.config.presets import preset
from deeploop.model.looplm import LoopLM, count_parameters
from deeploop.train.optim import clip_gradients, make_optimizer, step_if_finite
from deeploop.utils.device import pick_device

DEVICE = pick_device("auto")
CUDA = DEVICE.type == "cuda"
MODELS = ("gpt2-small-r1-deeploop", "loom-329m") if CUDA else ("deeploop-tiny", "loom-tiny")
PASSES = 1 + 4 + 3
TRAIN = TrainConfig()


def shipped(model: nn.Module):
    optimizer = make_optimizer(model, TRAIN)

    def step():
        step_if_finite(optimizer, clip_gradients(model, TRAIN.clip), TRAIN.lr)

    return optimizer, step


def groups(model: nn.Module) -> list[dict]:
    """Return the parameter groups of `make_optimizer` with their weight decay."""
    return [
        {key: group[key] for key in ("params", "weight_decay")}
        for group in make_optimizer(model, TRAIN).param_groups
    ]


def torchs(model: nn.Module, foreach: bool):
    parameters = list(model.parameters())
    options = {"lr": TRAIN.lr, "betas": (TRAIN.beta1, TRAIN.beta2), "foreach": foreach}
    optimizer = torch.optim.AdamW(groups(model), **options)

    def step():
        nn.utils.clip_grad_norm_(parameters, TRAIN.clip, foreach=foreach)
        optimizer.step()

    return optimizer, step


def apex(model: nn.Module):
    # Another project owns the name `apex` on the index; this module is NVIDIA's.
    from apex.optimizers import FusedAdam

    parameters = list(model.parameters())
    betas = (TRAIN.beta1, TRAIN.beta2)
    optimizer = FusedAdam(groups(model), lr=TRAIN.lr, betas=betas, adam_w_mode=True)

    def step():
        nn.utils.clip_grad_norm_(parameters, TRAIN.clip)
        optimizer.step()

    return optimizer, step


class Built(NamedTuple):
    """A contender's model, its optimizer, and a call that clips and steps."""

    model: LoopLM
    optimizer: torch.optim.Optimizer
    step: Callable[[], object]


CONTENDERS = {
    "shipped": shipped,
    "foreach": lambda model: torchs(model, True),
    "single": lambda model: torchs(model, False),
    "apex": apex,
}


def fresh(name: str) -> LoopLM:
    """Make a model with random gradients, the same ones at every call."""
    config = preset(name)
    m = config.replace("model", vocab_size=config.model.vocab_size or 256).model
    torch.manual_seed(0)
    model = LoopLM(m).to(DEVICE)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def built(name: str, missing: dict[str, str]) -> dict[str, Built]:
    """Take two steps with each contender; returns those whose weights agree with `single`."""
    result: dict[str, Built] = {}
    for contender, make in CONTENDERS.items():
        try:
            model = fresh(name)
            optimizer, step = make(model)
            for _ in range(2):
                step()
        except (ImportError, RuntimeError) as error:
            if contender == "shipped":
                raise
            missing[contender] = in_words(error)
        else:
            result[contender] = Built(model, optimizer, step)
    exact = list(result["single"].model.parameters())
    for contender, (model, *_) in list(result.items()):
        worst = max(map(relative_error, (p.detach() for p in model.parameters()), exact))
        if worst < 1e-5:
            continue
        assert contender != "shipped", f"weights are off by {worst:.1e}"
        missing[contender] = f"weights are off by {worst:.1e} of their norm"
        del result[contender]
    return result


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List the tensors that stay from step to step: parameters, gradients and moments."""
    moments = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    return [*(x for p in model.parameters() for x in (p, p.grad)), *moments]


@pytest.mark.parametrize("name", MODELS)
def test_optimizer_step(benchmark, machine, name):
    missing: dict[str, str] = {}
    running = built(name, missing)
    calls = {contender: b.step for contender, b in running.items()}
    existing = {contender: tensors(b.model, b.optimizer) for contender, b in running.items()}
    entries = machine.compare(
        calls, existing, rounds=15, fused={"shipped": ("FusedAdam",)}, opaque=("apex",)
    )
    model = running["shipped"].model
    n = count_parameters(model)
    work = Work(PASSES * 4 * n, counted(calls["single"], opened=True)[1])
    case = {"model": name, "parameters": n, "tensors": len(list(model.parameters()))}
    others = [contender for contender in entries if contender != "shipped"]
    benchmark.extra_info |= machine.record(
        "optimizer", case, torch.float32, work, entries, others, missing
    )
    print(f"\n{one_line(benchmark.extra_info)}")
    benchmark.pedantic(calls["shipped"], rounds=3)
