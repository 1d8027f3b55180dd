"""Decide which sequences end after a segment, and with how many segments they must go on at least.

    halted = segment >= S  or, in training, (Q says halt  and  segment >= least)

S is `segments`. Q says halt where q_halt > q_continue (`halt_continue`, HRM) or q_halt > 0
(`halt`, TRM). least is 1, but with probability `exploration` it is drawn from 2 to S. Evaluation
runs all S segments.

HRM's code draws least again in each segment, from a generator; here a sequence has one, which is a
pure function of the seed and of the example's number, as the paper's text has it: ranks,
micro-batches and a resumed run agree.

Source: HRM, arXiv 2506.21734; TRM, arXiv 2510.04871.
"""

import torch
from torch import Tensor

from deeploop.config import ReasonerConfig
from deeploop.model.noise import uniforms
from deeploop.model.reasoner import says_halt


def halted(
    q: Tensor, segment: Tensor, least: Tensor | None, config: ReasonerConfig, training: bool
) -> Tensor:
    """Return which sequences end here: bool [B].

    Args:
        q: [B, 2], logits of halting and of going on, after the segment.
        segment: int64 [B], segments that each sequence has run, this one included.
        least: int64 [B] (`least_segments`); None: 1.
        config: of the model.
        training: False runs all segments.
    """
    last = segment >= config.segments
    if not training:
        return last
    says = says_halt(q, config)
    return last | (says if least is None else says & (segment >= least))


def least_segments(seed: int, examples: Tensor, config: ReasonerConfig) -> Tensor:
    """Draw the least number of segments of examples: int64, of their shape.

    Args:
        seed: of the run.
        examples: int64, the numbers of the examples in the order in which a run draws them.
        config: of the model.
    """
    explores, share = uniforms(seed, examples, 2).unbind(-1)
    most = config.segments
    drawn = (2 + (share * (most - 1)).long()).clamp(max=most)
    return torch.where(explores < config.exploration, drawn, 1)
