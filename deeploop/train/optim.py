"""Optimizers with decay groups, and learning rates as pure functions of the step."""

import importlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deeploop.config import TrainConfig
from deeploop.config.train import OPTIMIZERS
from deeploop.train.adam_atan2 import AdamATan2


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Make the optimizer that `config.optimizer` names (`deeploop.config.train.OPTIMIZERS`).

    Every one keeps step, exp_avg and exp_avg_sq of each parameter, and skips a step whose
    `found_inf` is not 0 (`step_if_finite`).
    """
    module, _, name = OPTIMIZERS[config.optimizer].partition(":")
    return getattr(importlib.import_module(module), name)(model, config)


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Make a fused AdamW that decays matrices and, with `decay_gains`, norm gains.

    What a module's method `undecayed` returns is never decayed.
    """
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(decay_groups(model, config), lr=config.lr, betas=betas, fused=True)


def adam_atan2(model: nn.Module, config: TrainConfig) -> AdamATan2:
    """Make an AdamATan2 with the decay groups of `adamw`."""
    betas = (config.beta1, config.beta2)
    return AdamATan2(decay_groups(model, config), lr=config.lr, betas=betas)


def decay_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Group parameters by weight decay: matrices, then vectors, then what is never decayed.

    Vectors, such as norm gains, are decayed with `decay_gains`; what a module's method `undecayed`
    returns never is. The groups have the parameters' names, by which a checkpoint's moments are
    given back (`deeploop.runs.tensors`).
    """
    gains = config.weight_decay if config.decay_gains else 0.0
    kept = {id(p) for module in model.modules() for p in getattr(module, "undecayed", tuple)()}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    others = [(name, p) for name, p in named if id(p) not in kept]
    groups = [
        _group([(name, p) for name, p in others if p.dim() >= 2], config.weight_decay),
        _group([(name, p) for name, p in others if p.dim() < 2], gains),
    ]
    if len(others) < len(named):
        groups.append(_group([(name, p) for name, p in named if id(p) in kept], 0.0))
    return groups


def _group(named: Sequence[tuple[str, Tensor]], weight_decay: float) -> dict[str, Any]:
    # Names by themselves: of pairs, a group without parameters has none, which torch refuses.
    parameters, names = [p for _, p in named], [name for name, _ in named]
    return {"params": parameters, "param_names": names, "weight_decay": weight_decay}


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step from 0 to steps - 1.

    The rate rises linearly to `lr` over the first `warmup` of the steps and ends at
    `min_lr * lr`, which the last step takes exactly. wsd: constant, then linear over the
    last `decay` of the steps (10/80/10 by default). cosine: half a cosine from the step at
    `lr` to the last. constant: `lr` to the end.

    The rate stays at `lr` to the end where no step is left to decay over: in a run of one
    step, in one that warms up to its end, and in wsd with `decay` of less than half a step.
    A run resumed with other `steps` takes the schedule of the new number from there on.
    """
    last, warmup = config.steps - 1, round(config.warmup * config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.lr
    decay = last - max(0, warmup - 1)  # steps after the first one at lr
    if config.schedule == "wsd":
        decay = min(decay, round(config.decay * config.steps))
    share = min(1.0, (last - step) / decay) if decay else 1.0
    if config.schedule == "cosine":
        share = 0.5 * (1 - math.cos(math.pi * share))
    return config.lr * (config.min_lr + (1 - config.min_lr) * share)


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Scale gradients to a norm of at most `limit` (0: only measure); returns the norm before.

    The norm stays on the device: nothing here waits for it.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if limit > 0:
        nn.utils.clip_grads_with_norm_(
            [p for p in model.parameters() if p.grad is not None], limit, norm
        )
    return norm


def step_if_finite(optimizer: torch.optim.Optimizer, grad_norm: Tensor, lr: float) -> None:
    """Take one optimizer step, skipped on the device if the gradient norm is not finite.

    Fused optimizers and AdamATan2 take the skip flag as a tensor, as GradScaler passes it:
    weights and moments then stay unchanged, and the host does not wait for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = (~torch.isfinite(grad_norm)).float()  # type: ignore[attr-defined]
    optimizer.step()
