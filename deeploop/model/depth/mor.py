"""Mixture-of-Recursions (arXiv 2507.10524): what its two depth rules share.

A token that takes part in a loop f with its router's weight w leaves it with

    h + w (f(h) - h)     model.mor.output = convex; with w = 1 the loop alone
    h + w f(h)           released: the code adds f(h), whose residual is in it, to the stream

A rule's further tensors (LOOM's averages) are those of f; the router reads and w scales the
stream alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.config import MorConfig
from deeploop.model.state import put, take

if TYPE_CHECKING:
    from deeploop.model.state import LoopState


def route(h: Tensor, router: Tensor) -> Tensor:
    """Return a linear router's logits [B, T, n] in h's dtype: stream h, router [n, d_model]."""
    with torch.autocast(h.device.type, enabled=False):
        return F.linear(h, router)


def weighted(mor: MorConfig, h: Tensor, f: Tensor, w: Tensor) -> Tensor:
    """Return the stream after a loop: h before it, f after it, w [B, T] of its tokens."""
    if mor.output == "released":
        return h + w[..., None] * f
    return torch.lerp(h, f, w[..., None])  # f itself, to the bit, where w is 1


def gather(s: LoopState, index: Tensor) -> LoopState:
    """Return the state of some tokens, int64 [B, k], rising."""

    def some(x: Tensor | None) -> Tensor | None:
        return None if x is None else take(x, index)

    memory = s.memory
    if memory is not None:
        memory = type(memory)(*map(some, memory))
    return s._replace(h=take(s.h, index), n=some(s.n), memory=memory)


def scatter(s: LoopState, index: Tensor, after: LoopState, h: Tensor) -> LoopState:
    """Return the state of all tokens after a loop of some; the others keep their stream.

    Args:
        s: state before the loop, of all tokens.
        index: int64 [B, k], the tokens that took part.
        after: their state after the loop.
        h: their stream after it, [B, k, d_model].
    """

    def all_tokens(new: Tensor | None, old: Tensor | None) -> Tensor | None:
        if new is None:
            return old
        if old is None:
            old = new.new_zeros(*s.h.shape[:2], *new.shape[2:])
        return put(old, index, new)

    memory = after.memory
    if memory is not None:
        memory = type(memory)(*map(all_tokens, memory, s.memory or type(memory)()))
    return after._replace(h=put(s.h, index, h), n=None, memory=memory)
