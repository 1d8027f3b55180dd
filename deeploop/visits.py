"""A looped Transformer as a walk over visits of physical sublayers.

A sublayer owns parameters; a visit is one use of it. The residual stream `h`
and the next sublayer's already normalised input `n` travel together, so that
each visit ends in one fused kernel: residual rule plus following norm.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.kernels import post_sandwich, pre_norm
from deeploop.layers import Attention, SwiGLU


class Sublayer(nn.Module):
    """One physical sublayer: a branch, the gain in front of it, the gain behind it.

    `gain_in` [d_model] belongs to the norm in front of the branch, `gain_out`
    [d_model] to the norm on the residual sum behind it, which only the arms
    with a sandwich have. Every visit of the sublayer shares both.
    """

    def __init__(self, branch: Attention | SwiGLU, d_model: int, sandwich: bool):
        super().__init__()
        self.branch = branch
        self.gain_in = nn.Parameter(torch.ones(d_model))
        self.gain_out = nn.Parameter(torch.ones(d_model)) if sandwich else None


class Visit(NamedTuple):
    """One use of a sublayer, and the gain of the norm that follows it in the walk."""

    loop: int
    physical: int  # which of the 2K physical sublayers
    sublayer: Sublayer
    gain_next: Tensor  # [d_model]


def walk(sublayers: Sequence[Sublayer], loops: int, final_gain: Tensor) -> Iterator[Visit]:
    """Every visit of `loops` passes over the sublayers, in order.

    The norm that follows the last visit is the model's final norm.
    """
    for loop in range(loops):
        for index, sublayer in enumerate(sublayers):
            last = index + 1 == len(sublayers)
            if last and loop + 1 == loops:
                gain_next = final_gain
            else:
                gain_next = sublayers[0 if last else index + 1].gain_in
            yield Visit(loop, index, sublayer, gain_next)


def update(config: ModelConfig, h: Tensor, f: Tensor, visit: Visit) -> tuple[Tensor, Tensor]:
    """Add the branch output f to the stream h by the arm's rule, then norm for the next visit.

    h [B, T, d_model] keeps its dtype; the returned n has f's dtype.

        baseline           h' = h + f
        deepnorm, deeploop h' = RMS(alpha h + f) * gain_out
        all                n  = RMS(h') * gain_next
    """
    if visit.sublayer.gain_out is None:
        return pre_norm(h, f, visit.gain_next, eps=config.norm_eps)
    return post_sandwich(
        h, f, visit.sublayer.gain_out, visit.gain_next, config.alpha, config.norm_eps
    )
