"""How far gradients go back through the loops: all the way, in segments, or not far.

    full         one loss behind the last loop, one backward through all of them
    segments(K)  a loss and a backward behind every K loops (and the last); what crosses
                 a boundary, the stream and LOOM's global memory, carries no gradient
    last(k)      one loss; the loops before the last k run without gradient

Each segment embeds the tokens anew, so that the embedding gets its gradient in every
one. Activations live for one segment: memory under segments(K) does not grow with the
loops. With K of all the loops, segments and last are full, to the bit.

Source: LOOM, arXiv 2610.01153 (segments); Huginn, arXiv 2502.05171 (last).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.config import Config
from deeploop.config.backprop import Segment
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.model.recompute import Watch
from deeploop.model.visits import LoopState, cut
from deeploop.utils.device import autocast
from deeploop.utils.spans import span


class Piece(NamedTuple):
    """What a segment leaves: the carried stream, and figures of one micro-batch."""

    carried: LoopState
    loss: Tensor  # its share of the batch's mean cross-entropy, nats
    z: Tensor | None  # its share of the z-loss term: a mean over tokens, summed over visits
    loads: tuple[Tensor, ...]  # of each MoE visit, without gradient ones too: int64 [experts]


def backward(
    model: LoopLM,
    config: Config,
    segment: Segment,
    tokens: Tensor,
    targets: Tensor,
    carried: LoopState | None,
    watch: Watch | None,
    chunk_rows: int | None = None,
) -> Piece:
    """Forward, loss and backward of one segment on one micro-batch; gradients add up.

    tokens, targets: int64 [B, T], a part of the global batch; losses are divided by the
    targets of the whole one. chunk_rows: rows of logits alive at once, by default the
    device's (`deeploop.model.loss`). Raises nothing on a loss that is not finite.
    """
    m, t = config.model, config.train
    device, batch = tokens.device, t.batch_size * m.seq_len
    loads: tuple[Tensor, ...] = ()
    where = f"loops {segment.loops.start + 1}-{segment.loops.stop}"
    with span(f"{where} forward"), autocast(device, t.precision):
        if segment.ahead:
            with torch.no_grad():
                left = model.run(tokens, segment.ahead, carried, watch=watch)
            carried, loads = cut(m, left), left.loads
        s = model.run(tokens, segment.loops, carried, watch=watch, recompute=t.recompute)
        assert s.n is not None
        with span("loss"):
            loss = linear_cross_entropy(s.n, model.head, targets, chunk_rows) / batch
        z = None if s.z is None else s.z * (tokens.numel() / batch)
        total = loss if z is None or not m.moe.z_loss else loss + m.moe.z_loss * z
    with span(f"{where} backward"):
        total.backward()
    return Piece(cut(m, s), loss.detach(), None if z is None else z.detach(), loads + s.loads)
