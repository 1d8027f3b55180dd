"""Activation checkpointing that keeps the routers' choices."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from deeploop.model.state import LoopState, OnVisit


def maybe_checkpoint(fn: Callable[..., LoopState], enabled: bool) -> Callable[..., LoopState]:
    """Wrap `fn(state, where, on_visit)` so that backward runs it again, if `enabled`.

    Router choices are saved, not recomputed, so that no token changes experts in between;
    on_visit is called in the first run only.
    """
    if not enabled:
        return fn

    def run(s: LoopState, where: object, on_visit: OnVisit | None) -> LoopState:
        runs = itertools.count()

        def body(s: LoopState) -> LoopState:
            return fn(s, where, on_visit if next(runs) == 0 else None)

        return checkpoint(
            body, s, use_reentrant=False, preserve_rng_state=False, context_fn=_save_routing
        )

    return run


def _save_routing() -> tuple[AbstractContextManager, AbstractContextManager]:
    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        is_router = op is torch.ops.deeploop.sigmoid_router.default
        return CheckpointPolicy.MUST_SAVE if is_router else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
