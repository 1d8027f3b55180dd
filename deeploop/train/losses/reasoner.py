"""The loss of a segment of a reasoner, and the target of its Q head.

    sum over sequences of   mean over its labels of the stablemax cross-entropy
                            + (BCE(q_halt, exact) + BCE(q_continue, target)) / 2

divided by the sequences of the whole batch. exact: all labels of the sequence are predicted
right. The target of q_continue is what the next segment of the same states gives,

    sigmoid(max(q'_halt, q'_continue)), or sigmoid(q'_halt) in a sequence's last segment

TRM trains q_halt alone.

Sources: HRM, arXiv 2506.21734; TRM, arXiv 2510.04871.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.data.batches import IGNORE
from deeploop.model.stablemax import stablemax_cross_entropy


class SegmentLoss(NamedTuple):
    """The loss of a segment and what it is made of, on the device."""

    total: Tensor  # float64 scalar with gradient, already divided by the whole batch
    cross_entropy: Tensor  # float64 [B], mean over each sequence's labels
    q_halt: Tensor  # [B], binary cross-entropy
    q_continue: Tensor  # [B], binary cross-entropy; 0 without a target
    right: Tensor  # int64 [B], labels predicted right
    labels: Tensor  # int64 [B], labels
    exact: Tensor  # bool [B]


def segment_loss(
    logits: Tensor, q: Tensor, targets: Tensor, batch_size: int, target: Tensor | None = None
) -> SegmentLoss:
    """Compute the loss of a segment.

    Args:
        logits: [B, T, vocab] (`Reasoner.logits`).
        q: [B, 2], logits of halting and of going on.
        targets: int64 [B, T]; cells with IGNORE have no label.
        batch_size: sequences of the whole batch, over micro-batches and ranks.
        target: [B], of `continue_target`; None trains q_halt alone (TRM).
    """
    labelled = targets != IGNORE
    labels = labelled.sum(-1)
    right = (labelled & (logits.detach().argmax(-1) == targets)).sum(-1)
    exact = right == labels
    per_label = stablemax_cross_entropy(logits, targets)
    cross_entropy = per_label.sum(-1) / labels.clamp(min=1)
    q_halt = _bce(q[:, 0], exact.to(q.dtype))
    q_continue = torch.zeros_like(q_halt) if target is None else _bce(q[:, 1], target)
    total = (cross_entropy + 0.5 * (q_halt + q_continue)).sum() / batch_size
    parts = cross_entropy.detach(), q_halt.detach(), q_continue.detach()
    return SegmentLoss(total, *parts, right, labels, exact)


def continue_target(next_q: Tensor, last: Tensor) -> Tensor:
    """Return the bootstrapped target of q_continue: [B], from 0 to 1, without gradient.

    Args:
        next_q: [B, 2], of the next segment of the same states.
        last: bool [B], whether the segment is the sequence's last.
    """
    halt = next_q[:, 0]
    return torch.where(last, halt, next_q.amax(-1)).sigmoid().detach()


def _bce(logit: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logit, target, reduction="none")
