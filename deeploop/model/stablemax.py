"""Compute cross-entropy with stablemax in the place of softmax.

    p_i = s(x_i) / sum_j s(x_j),   s(x) = x + 1 where x >= 0, else 1 / (1 - x)

Unlike exp, s grows linearly, so that a model that is right does not push its logits without end
(arXiv 2501.04697); HRM and TRM train with it, in float64.
"""

import torch
from torch import Tensor

from deeploop.data.batches import IGNORE


def stablemax_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p of each target: float64, like targets, 0 where there is none.

    Args:
        logits: [..., vocab_size]; computed in float64.
        targets: int64 [...], IGNORE where there is none.
    """
    x = logits.double()
    s = torch.where(x < 0, 1 / (1 - x.clamp_max(0)), x + 1)
    answers = targets != IGNORE
    of_target = s.gather(-1, targets.where(answers, 0)[..., None])[..., 0]
    return (s.sum(-1) / of_target).log().where(answers, 0.0)
