"""Run a piece of the model again in backward instead of keeping its activations."""

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from deeploop.model.visits import LoopState, Visit

Watch = Callable[[Visit, Tensor], None]


def again(piece: Callable[..., LoopState], wanted: bool) -> Callable[..., LoopState]:
    """`piece(stream, where, watch)`, run once more in backward if wanted.

    What the router chose is kept, so that no token changes experts in between; watch
    sees the first run only.
    """
    if not wanted:
        return piece

    def run(s: LoopState, where: object, watch: Watch | None) -> LoopState:
        runs = itertools.count()

        def body(s: LoopState) -> LoopState:
            return piece(s, where, watch if next(runs) == 0 else None)

        return checkpoint(
            body, s, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_routing
        )

    return run


def _keep_routing() -> tuple[AbstractContextManager, AbstractContextManager]:
    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = op is torch.ops.deeploop.sigmoid_router.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
