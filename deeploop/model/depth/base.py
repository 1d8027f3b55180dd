"""The contract of a depth rule, and the rule `fixed`: every token takes part in every loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from deeploop.config import ModelConfig

if TYPE_CHECKING:
    from deeploop.model.state import LoopInputs, LoopState

# Runs the core's blocks for the tokens of a state, in a loop counted from 0.
RunLoop = Callable[["LoopState", int, "LoopInputs"], "LoopState"]
OnLoop = Callable[["LoopState"], None]  # called with the state after each loop


class Depth(nn.Module):
    """Run every loop for every token.

    A subclass overrides what differs: `loop` for one loop, `run` for all of them, `readout` for
    the state that the coda and the head read. Its tensors travel in `LoopState.depth`, each
    [B, T, ...] or a sum over tokens.
    """

    changes_stream = False  # True if it changes the stream after a loop: no norm is taken there
    shares_keys = False  # True if later loops read the first loop's keys and values

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config

    def init_weights(self) -> None:
        """Fill the weights; called after every other initialisation. Here there are none."""

    def run(
        self,
        s: LoopState,
        loops: range,
        run_loop: RunLoop,
        inputs: LoopInputs,
        on_loop: OnLoop | None = None,
    ) -> LoopState:
        """Run some loops and return the state after them.

        Args:
            s: the start state, or the state after the loops before.
            loops: which loops, counted from 0.
            run_loop: runs the core's blocks for the tokens of a state.
            inputs: what the blocks read beside the state, of all tokens.
            on_loop: called with the state after each loop.
        """
        for loop in loops:
            s = self.loop(s, loop, run_loop, inputs)
            if on_loop is not None:
                on_loop(s)
        return s

    def loop(self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs) -> LoopState:
        """Run one loop, counted from 0."""
        return run_loop(s, loop, inputs)

    def readout(self, s: LoopState) -> LoopState:
        """Return the state that the coda and the head read after the last loop."""
        return s

    def exit_logit(self, s: LoopState) -> Tensor | None:
        """Return the logit of leaving after a loop; None for a rule that gives none.

        Args:
            s: state after the loop, as the coda or the head reads it.

        Returns:
            float32 [B, T] (`deeploop.model.depth.gate.log_exit_distribution`), or None.
        """
        return None

    def loops_taken(self, s: LoopState) -> Tensor | None:
        """Return the loops that changed each token [B, T]; None where all change every one.

        s: state after the last loop that was run.
        """
        return None

    def penalty(self, s: LoopState) -> Tensor | None:
        """Return what the rule adds to the loss: a scalar, weighted, its mean over tokens."""
        return None

    def figures(self, s: LoopState) -> dict[str, Tensor]:
        """Return figures to log of the state after the last loop: means over tokens.

        Scalars, or [loops] (then named in `deeploop.runs.metrics_file.LISTS`).
        """
        return {}


def choose(take: Tensor, after: LoopState, before: LoopState) -> LoopState:
    """Return `after` for the tokens of bool `take` [B, T] (or [B, 1]), `before` for the others.

    The normalised input is left out, and taken anew from the stream where it is needed.
    """

    def pick(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(take.view(*take.shape, *[1] * (new.dim() - 2)), new, old)

    def pick_memory(new: Tensor | None, old: Tensor | None) -> Tensor | None:
        some = old if new is None else new
        if some is None:
            return None
        zeros = torch.zeros_like(some) if new is None or old is None else some  # None is zeros
        return pick(zeros if new is None else new, zeros if old is None else old)

    memory = after.memory
    if memory is not None:
        old = type(memory)() if before.memory is None else before.memory
        memory = type(memory)(*map(pick_memory, memory, old))
    return after._replace(h=pick(after.h, before.h), n=None, memory=memory)


def start_later(
    first_loops: Tensor | None, loop: int, after: LoopState, before: LoopState
) -> LoopState:
    """Return the state after a loop, and the one before it for sequences that start later.

    Args:
        first_loops: int64 [B], each sequence's first loop; None: all take part.
        loop: counted from 0.
        after, before: states after and before the loop.
    """
    return after if first_loops is None else choose((first_loops <= loop)[:, None], after, before)


def detached(tensors: Any) -> Any:
    """Return the tensors of `LoopState.depth` or another nesting without gradient."""
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, tensors)
