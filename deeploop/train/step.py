"""The training step: forward, backward, clip, optimizer, expert balancing."""

import contextlib
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from deeploop.config import Config, MoEConfig
from deeploop.config.backprop import Segment, optimizer_steps
from deeploop.model.looplm import LoopLM
from deeploop.model.moe.layer import MoE, update_router_bias_
from deeploop.model.state import LoopState
from deeploop.train.backprop import MicroBatch, run_segment
from deeploop.train.metrics import StepMetrics
from deeploop.train.optim import clip_gradients, step_if_finite
from deeploop.utils.distributed import Ranks
from deeploop.utils.spans import span


def train_step(
    model: LoopLM,
    optimizer: torch.optim.Optimizer,
    config: Config,
    micro_batches: Sequence[MicroBatch | tuple[Tensor, Tensor]],
    lr: float,
    *,
    step: int = 0,
    ranks: Ranks = Ranks(),  # noqa: B008
    observe: bool = False,
    groups: Sequence[Sequence[Segment]] | None = None,
    around: Callable[[Segment | None], AbstractContextManager] = contextlib.nullcontext,
    chunk_rows: int | None = None,
    teacher: LoopLM | None = None,
) -> StepMetrics:
    """Take one pass over a batch: an optimizer step after each group of segments.

    Args:
        model, optimizer: updated in place (`deeploop.train.optim.make_optimizer`).
        config: of the run; `config.train.batch_size` sequences are the whole batch.
        micro_batches: this rank's sequences; pairs of tokens and targets will do.
        lr: learning rate of this step.
        step: of the run, counted from 0; a number of loops that is drawn depends on it.
        ranks: processes that share the batch; gradients are summed over them.
        observe: also measure the stream's RMS after each loop.
        groups: segments of each optimizer step; by default those of `config.train.backprop`.
        chunk_rows: rows of logits alive at once (`deeploop.model.loss`).
        around: makes a context for each segment, and with None for each optimizer step.
        teacher: a trained model, in eval mode, for `config.train.teacher_weight`.

    Returns:
        The step's figures, still on the device. Weights stay as they were where a gradient is
        not finite (`StepMetrics.nonfinite`).
    """
    metrics = StepMetrics(model, observe)
    states: list[LoopState | None] = [None] * len(micro_batches)
    groups = groups or optimizer_steps(config.train, config.model.loops, step)
    for group in groups:
        for i, tensors in enumerate(micro_batches):
            batch = MicroBatch(*tensors)
            for segment in group:
                on_visit = metrics.on_visit(segment)
                with around(segment):
                    result = run_segment(
                        model, config, segment, batch, states[i], on_visit, chunk_rows, teacher
                    )
                metrics.add(segment, result)
                states[i] = result.state
                del result  # frees the routers' loads before the next segment
            if group is groups[-1]:
                states[i] = None  # a stream for each micro-batch is large
        with around(None):
            ranks.all_reduce_(p.grad for p in model.parameters() if p.grad is not None)
            metrics.grad_norm = apply_gradients(model, optimizer, config.train.clip, lr)
        metrics.check(metrics.grad_norm)
    metrics.gather(ranks)
    metrics.check(metrics.total_loss())
    balance_experts(model, metrics, config.model.moe)
    return metrics


def apply_gradients(
    model: LoopLM,
    optimizer: torch.optim.Optimizer,
    clip: float,
    lr: float,
    exclude: Collection[Tensor] = (),
) -> Tensor:
    """Clip, step the optimizer unless a gradient is not finite, and clear the gradients.

    Parameters in `exclude` count towards the norm but are not stepped. Returns the gradient
    norm before clipping, on the device: nothing here waits for it.
    """
    with span("optimizer"):
        norm = clip_gradients(model, clip)
        for p in exclude:
            p.grad = None
        step_if_finite(optimizer, norm, lr)
        optimizer.zero_grad(set_to_none=True)
    return norm


def balance_experts(model: LoopLM, metrics: StepMetrics, config: MoEConfig) -> None:
    """Move each router's bias towards even loads over the whole batch, unless it was not finite."""
    if metrics.loads is None or not config.balance_lr:
        return
    loads, centred = metrics.loads.sum(0), config.balance == "centred"
    if not centred and metrics.dropped is not None:
        loads = loads - metrics.dropped
    moes = [s.branch for s in model.sublayers if isinstance(s.branch, MoE)]
    for moe, load in zip(moes, loads, strict=True):
        update_router_bias_(moe.bias, load * ~metrics.nonfinite, config.balance_lr, centred)
        metrics.check(moe.bias)  # it steers the choice of experts alone: no loss would show it
