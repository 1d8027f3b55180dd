"""Compute cross-entropy with stablemax in the place of softmax, as HRM and TRM train.

Stablemax is the softmax of log s(x), with s(x) = x + 1 from 0 on and 1 / (1 - x) below: it grows
like x and not like e^x, so that a model that is right does not push its logits without end. It is
taken in float64. Source: arXiv 2501.04697.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.data.batches import IGNORE


def stablemax_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log of each target's stablemax probability.

    Args:
        logits: [B, T, vocab], a float dtype.
        targets: int64 [B, T]; IGNORE gives 0.

    Returns:
        float64 [B, T], nats.
    """
    x = logits.double()
    # Each clamp also keeps the branch that is not taken, and its gradient, finite.
    log_s = torch.where(x < 0, -torch.log1p(-x.clamp(max=0)), torch.log1p(x.clamp(min=0)))
    loss = F.cross_entropy(log_s.flatten(0, 1), targets.flatten(), reduction="none",
                           ignore_index=IGNORE)  # fmt: skip
    return loss.view(targets.shape)
