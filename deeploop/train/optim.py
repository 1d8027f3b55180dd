"""AdamW with decay groups, and learning rates as pure functions of the step."""

import math

import torch
from torch import Tensor, nn

from deeploop.config import TrainConfig


def adamw(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Make a fused AdamW that decays matrices and, with `decay_gains`, norm gains."""
    gains = config.weight_decay if config.decay_gains else 0.0
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": gains},
    ]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Return the learning rate of a step from 0 to steps - 1.

    wsd: linear warm-up, constant, linear decay to `min_lr * lr` over the last
    `decay` of the steps (10/80/10 by default). cosine: warm-up, then half a
    cosine down to `min_lr * lr`.
    """
    warmup = round(config.warmup * config.steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "cosine":
        done = (step - warmup) / max(1, config.steps - warmup)
        share = 0.5 * (1 + math.cos(math.pi * done))
    else:
        share = min(1.0, (config.steps - step) / max(1, round(config.decay * config.steps)))
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


def step_if_finite(optimizer: torch.optim.AdamW, grad_norm: Tensor, lr: float) -> None:
    """Take one optimizer step, skipped on the device if the gradient norm is not finite.

    Fused optimizers take the skip flag as a tensor, as GradScaler passes it: weights and
    moments then stay unchanged, and the host does not wait for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.found_inf = (~torch.isfinite(grad_norm)).float()  # type: ignore[attr-defined]
    optimizer.step()
