"""Run one segment of loops: forward, loss and backward.

    full         one loss after the last loop, one backward through all of them
    segments(K)  a loss and a backward after every K loops (and the last); the state that
                 crosses a boundary (`Residual.detach`) carries no gradient
    last(k)      one loss; the loops before the last k run without gradient
    progressive  a loss after n + k loops, of which the first n run without gradient, and one
                 after all loops

Each segment embeds the tokens anew, so that under a rule that injects the embedding it gets a
gradient in every one. Activations live for one segment: memory under segments(K) does not grow
with the loops. With K or k of all the loops, segments and last are full, to the bit. `train.loss`
(`deeploop.train.losses`) says after which loops of a segment the head predicts.
`deeploop.config.backprop` lists the segments of a batch.

Source: LOOM, arXiv 2610.01153 (segments); Huginn, arXiv 2502.05171 (last).
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.config import Config
from deeploop.config.backprop import Segment
from deeploop.model.looplm import LoopLM
from deeploop.model.state import Draws, LoopState, OnVisit
from deeploop.train.losses import loss_rule
from deeploop.train.losses.base import LoopEnds
from deeploop.utils.device import autocast
from deeploop.utils.spans import span


class MicroBatch(NamedTuple):
    """Some sequences of a batch, each tensor on the model's device."""

    tokens: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B, T]
    draws: Draws = Draws()
    batch_targets: int | None = None  # of the whole batch; None: every token has a target


class SegmentResult(NamedTuple):
    """The state after a segment, and figures of one micro-batch."""

    state: LoopState  # without gradient, for the next segment
    loss: Tensor  # its share of the batch's mean cross-entropy after the last loop, nats
    z: Tensor | None  # its share of the z-loss term: a mean over tokens, summed over visits
    expert_loads: tuple[Tensor, ...]  # of each MoE visit, those without gradient, too
    figures: dict[str, Tensor]  # shares of means over the batch's tokens or targets


def run_segment(
    model: LoopLM,
    config: Config,
    segment: Segment,
    batch: MicroBatch,
    state: LoopState | None = None,
    on_visit: OnVisit | None = None,
    chunk_rows: int | None = None,
    teacher: LoopLM | None = None,
) -> SegmentResult:
    """Run forward, loss and backward of one segment on one micro-batch; gradients add up.

    Args:
        model: its parameters' .grad receive the gradients.
        config: the loss, precision, z-loss, recompute and the global batch size are read.
        segment: the loops to run.
        batch: some sequences of the global batch; losses are divided by the targets of the
            whole batch.
        state: state after the segment before; a segment that starts from the tokens ignores it.
        on_visit: called with each visit and the stream after it.
        chunk_rows: rows of logits alive at once (`deeploop.model.loss`).
        teacher: whose predictions are a target beside the text, in eval mode.

    Raises nothing on a loss that is not finite.
    """
    m, t = config.model, config.train
    tokens, batch_tokens = batch.tokens, t.batch_size * m.seq_len
    share, targets = tokens.numel() / batch_tokens, batch.batch_targets or batch_tokens
    state = None if segment.from_start else state
    loss_of, ends = loss_rule(t, teacher), LoopEnds(model, tokens, on_visit)
    loads: tuple[Tensor, ...] = ()
    run = functools.partial(model.run, tokens, on_visit=on_visit, draws=batch.draws)
    name = f"loops {segment.loops.start + 1}-{segment.loops.stop}"
    with span(f"{name} forward"), autocast(tokens.device, t.precision):
        if segment.no_grad_loops:
            with torch.no_grad():
                before = run(segment.no_grad_loops, state)
            state, loads = model.detach(before), before.expert_loads
        on_loop = ends.add if loss_of.each_loop else None
        s = run(segment.loops, state, recompute=t.recompute, on_loop=on_loop)
        if not loss_of.each_loop:
            ends.add_last(s)
        with span("loss"):
            terms = loss_of(ends, batch.targets, chunk_rows)
        total = terms.total / targets
        z = None if s.router_z is None else s.router_z * share
        if z is not None and m.moe.z_loss:
            total = total + m.moe.z_loss * z
        penalty = model.depth.penalty(s)
        if penalty is not None:
            total = total + penalty * share
    with span(f"{name} backward"):
        (total * segment.weight if segment.weight != 1 else total).backward()
    measured = model.depth.figures(s) | model.borders.figures()
    figures = {k: v.detach() * share for k, v in measured.items()}
    figures |= {k: v / targets for k, v in terms.figures.items()}
    return SegmentResult(
        model.detach(s), terms.loss.detach() / targets,
        None if z is None else z.detach(), loads + s.expert_loads, figures,
    )  # fmt: skip
