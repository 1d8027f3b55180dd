"""Run one segment of loops: forward, loss and backward.

    full         one loss after the last loop, one backward through all of them
    segments(K)  a loss and a backward after every K loops (and the last); the state that
                 crosses a boundary (`Residual.detach`) carries no gradient
    last(k)      one loss; the loops before the last k run without gradient

Each segment embeds the tokens anew, so that under a rule that injects the embedding it gets a
gradient in every one. Activations live for one segment: memory under segments(K) does not grow
with the loops. With K or k of all the loops, segments and last are full, to the bit.
`deeploop.config.backprop` lists the segments of a batch.

Source: LOOM, arXiv 2610.01153 (segments); Huginn, arXiv 2502.05171 (last).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.config import Config
from deeploop.config.backprop import Segment
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.model.state import LoopState, OnVisit
from deeploop.utils.device import autocast
from deeploop.utils.spans import span


class SegmentResult(NamedTuple):
    """The state after a segment, and figures of one micro-batch."""

    state: LoopState  # without gradient, for the next segment
    loss: Tensor  # its share of the batch's mean cross-entropy, nats
    z: Tensor | None  # its share of the z-loss term: a mean over tokens, summed over visits
    expert_loads: tuple[Tensor, ...]  # of each MoE visit, those without gradient, too


def run_segment(
    model: LoopLM,
    config: Config,
    segment: Segment,
    tokens: Tensor,
    targets: Tensor,
    state: LoopState | None = None,
    on_visit: OnVisit | None = None,
    chunk_rows: int | None = None,
    keys: Tensor | None = None,
) -> SegmentResult:
    """Run forward, loss and backward of one segment on one micro-batch; gradients add up.

    Args:
        model: its parameters' .grad receive the gradients.
        config: precision, z-loss, recompute and the global batch size are read.
        segment: the loops to run.
        tokens, targets: int64 [B, T], some sequences of the global batch; losses are divided by
            the targets of the whole batch.
        state: state after the loops before; None for the first segment.
        on_visit: called with each visit and the stream after it.
        chunk_rows: rows of logits alive at once (`deeploop.model.loss`).
        keys: int64 [B], of the start's noise (`deeploop.model.noise`).

    Raises nothing on a loss that is not finite.
    """
    m, t = config.model, config.train
    batch_tokens = t.batch_size * m.seq_len
    loads: tuple[Tensor, ...] = ()
    name = f"loops {segment.loops.start + 1}-{segment.loops.stop}"
    with span(f"{name} forward"), autocast(tokens.device, t.precision):
        if segment.no_grad_loops:
            with torch.no_grad():
                before = model.run(
                    tokens, segment.no_grad_loops, state, on_visit=on_visit, keys=keys
                )
            state, loads = model.rule.detach(before), before.expert_loads
        s = model.run(
            tokens, segment.loops, state, on_visit=on_visit, recompute=t.recompute, keys=keys
        )
        n = model.output(s, tokens, on_visit=on_visit)
        with span("loss"):
            loss = linear_cross_entropy(n, model.head, targets, chunk_rows) / batch_tokens
        z = None if s.router_z is None else s.router_z * (tokens.numel() / batch_tokens)
        total = loss if z is None or not m.moe.z_loss else loss + m.moe.z_loss * z
    with span(f"{name} backward"):
        total.backward()
    return SegmentResult(
        model.rule.detach(s), loss.detach(), None if z is None else z.detach(),
        loads + s.expert_loads,
    )  # fmt: skip
