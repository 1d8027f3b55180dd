"""deepnorm, deeploop: h' = RMSNorm(alpha h + f) * gain_out; each branch also norms its input.

alpha = (2N)^p acts at run time, beta = (8N)^-p on the initial weights alone; N counts the
blocks that a token passes in training. deepnorm has p = 1/4, deeploop p = 1/2.

Source: DeepNet, arXiv 2203.00555; DeepLoop, arXiv 2607.13491 (Eq. 3.1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from deeploop.config import ModelConfig
from deeploop.kernels import post_sandwich
from deeploop.model.moe.layer import Routed, combine
from deeploop.model.residual.base import Residual

if TYPE_CHECKING:
    from deeploop.model.state import LoopState, Visit


class DeepNorm(Residual):
    """h' = RMSNorm(alpha h + f) * gain_out."""

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.alpha = config.alpha

    def gains(self, kind: str) -> tuple[bool, bool]:
        return True, True

    def describe(self) -> str:
        return f"alpha {self.alpha:.3f}, beta {self.config.beta:.4f}"

    def __call__(self, s: LoopState, f: Tensor | Routed, visit: Visit) -> LoopState:
        gain = visit.sublayer.gain_out
        h, n = post_sandwich(
            s.h, combine(f), gain, visit.next_gain, self.alpha, self.eps, norm=visit.norm
        )
        return s._replace(h=h, n=n)

    def reference(self, s: LoopState, f: Tensor, visit: Visit) -> LoopState:
        h = self.alpha * s.h + f
        return s._replace(h=F.rms_norm(h, h.shape[-1:], visit.sublayer.gain_out, self.eps))
