"""Mixture-of-Recursions (arXiv 2507.10524): what its two depth rules share.

A token that takes part in a loop f with its router's weight w leaves it with

    h + w (f(h) - h)     model.mor.output = convex; with w = 1 the loop alone
    h + w f(h)           released: the code adds f(h), whose residual is in it, to the stream

and all others keep their stream. A rule's further tensors (LOOM's averages) are those of f; the
router reads and w scales the stream alone.

With model.mor.kv = selected a loop's keys and values are those of the tokens that take part in it.
With first they are those of the first loop, which all tokens take part in; later loops then
compute queries alone. In a segment of loops that follows another they carry no gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.config import ModelConfig
from deeploop.config.depth import key_loops
from deeploop.model.depth.base import Depth, RunLoop, choose
from deeploop.model.state import put, take

if TYPE_CHECKING:
    from deeploop.model.state import LoopInputs, LoopState


class TokenRouting(Depth):
    """Run the tokens of a state, some or all, with their router's weight."""

    changes_stream = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.shares_keys = key_loops(config, 2) == 1

    def loops_taken(self, s: LoopState) -> Tensor:
        return s.depth.loops.clamp(max=len(s.depth.shares))

    def weighted(self, h: Tensor, f: Tensor, w: Tensor) -> Tensor:
        """Return the stream after a loop: h before it, f after it, w [B, T] of its tokens."""
        if self.config.mor.output == "released":
            return h + w[..., None] * f
        return torch.lerp(h, f, w[..., None])  # f itself, to the bit, where w is 1

    def run_all(
        self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs, w: Tensor
    ) -> LoopState:
        """Run a loop of all tokens, with weights w [B, T]."""
        after = run_loop(s, loop, inputs)
        return after._replace(h=self.weighted(s.h, after.h, w), n=None)

    def run_some(
        self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs, w: Tensor,
        places: Tensor,
    ) -> LoopState:  # fmt: skip
        """Run a loop of the tokens at places, int64 [B, k], rising, and of no others."""
        some, inputs = gather(s, places), inputs.take(places)
        if self.shares_keys:
            seen = torch.arange(s.h.shape[1], device=places.device) <= places[..., None]
            inputs = inputs._replace(mask=seen[:, None])
        after = run_loop(some, loop, inputs)
        return scatter(s, places, after, self.weighted(some.h, after.h, w.gather(1, places)))

    def run_masked(
        self, s: LoopState, loop: int, run_loop: RunLoop, inputs: LoopInputs, w: Tensor,
        took: Tensor,
    ) -> LoopState:  # fmt: skip
        """Run a loop of all tokens, of which those of bool took [B, T] take part."""
        after = run_loop(s, loop, inputs if self.shares_keys else inputs._replace(valid=took))
        return choose(took, after._replace(h=self.weighted(s.h, after.h, w)), s)


def route(h: Tensor, router: Tensor) -> Tensor:
    """Return a linear router's logits [B, T, n] in h's dtype: stream h, router [n, d_model]."""
    with torch.autocast(h.device.type, enabled=False):
        return F.linear(h, router)


def gather(s: LoopState, places: Tensor) -> LoopState:
    """Return the state of the tokens at places, int64 [B, k], rising."""

    def some(x: Tensor | None) -> Tensor | None:
        return None if x is None else take(x, places)

    memory = s.memory
    if memory is not None:
        memory = type(memory)(*map(some, memory))
    return s._replace(h=take(s.h, places), n=some(s.n), memory=memory)


def scatter(s: LoopState, places: Tensor, after: LoopState, h: Tensor) -> LoopState:
    """Return the state of all tokens after a loop of some.

    Args:
        s: state before the loop, of all tokens.
        places: int64 [B, k], the tokens that took part.
        after: their state after the loop.
        h: their stream after it, [B, k, d_model].
    """

    def all_tokens(new: Tensor | None, old: Tensor | None) -> Tensor | None:
        if new is None:
            return old
        if old is None:
            old = new.new_zeros(*s.h.shape[:2], *new.shape[2:])
        return put(old, places, new)

    memory = after.memory
    if memory is not None:
        memory = type(memory)(*map(all_tokens, memory, s.memory or type(memory)()))
    return after._replace(h=put(s.h, places, h), n=None, memory=memory)
