"""Check that a run's weights, optimizer state and residual stream are finite before a save.

A step with finite losses and gradients can still ruin the weights: by a large learning rate, or
in rows of the embedding that no later token uses.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from deeploop.model.looplm import LoopLM
from deeploop.train.metrics import record_loop_rms


def state_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """List the tensors of floats that a checkpoint holds: weights, buffers and moments."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and weight.numel():
            yield f"weight {name}", weight
    for p, state in optimizer.state.items():
        for kind, value in state.items():
            if isinstance(value, Tensor) and value.numel():
                yield f"{kind} of {names.get(p, 'a parameter')}", value


def state_is_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return whether every weight and moment is finite: bool scalar on the device.

    One fused reduction, the largest magnitude of all; NaN counts as larger than any number.
    """
    tensors = [tensor for _, tensor in state_tensors(model, optimizer)]
    return nn.utils.get_total_norm(tensors, math.inf).isfinite()


def first_nonfinite(model: nn.Module, optimizer: torch.optim.Optimizer) -> str | None:
    """Name the first tensor of `state_tensors` that is not finite, None without one."""
    named = state_tensors(model, optimizer)
    return next((name for name, tensor in named if not tensor.isfinite().all()), None)


@torch.no_grad()
def stream_is_finite(model: LoopLM, tokens: Tensor) -> Tensor:
    """Return whether the stream's RMS is finite at every loop's end: bool scalar on the device.

    Args:
        model: run in eval mode.
        tokens: int64 [B, T].
    """
    values: list[Tensor] = []
    training = model.training
    model.eval()
    try:
        model(tokens, on_visit=record_loop_rms(values))
    finally:
        model.train(training)
    return torch.stack(values).isfinite().all()
