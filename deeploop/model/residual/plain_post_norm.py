"""plain_post_norm: h' = RMSNorm(alpha h + f), with no gain and no norm before a branch.

The branches read the stream itself: n = h'. alpha is 1, but in a module of a reasoner with
`model.reasoner.visits`. A branch that mixes positions by a SwiGLU norms over positions, as TRM's
released code does, and not over the width.

Sources: HRM, arXiv 2506.21734 (alpha = 1); DeepLoop, arXiv 2607.13491, section 4 (alpha, beta);
TRM, arXiv 2510.04871.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from deeploop.config import ModelConfig
from deeploop.config.reasoner import Scales
from deeploop.kernels import post_sandwich
from deeploop.model.moe.layer import Routed, combine
from deeploop.model.residual.base import Residual

if TYPE_CHECKING:
    from deeploop.model.state import LoopState, Visit


class PlainPostNorm(Residual):
    """h' = RMSNorm(alpha h + f)."""

    final_gain = norms_input = False

    def __init__(self, config: ModelConfig, scales: Scales = Scales()):  # noqa: B008
        super().__init__(config)
        self.scales = scales

    def gains(self, kind: str) -> tuple[bool, bool]:
        return False, False

    def init_gain(self) -> float:
        return self.scales.beta

    def describe(self) -> str:
        alpha, beta = self.scales
        return "" if alpha == beta == 1 else f"alpha {alpha:.3f}, beta {beta:.4f}"

    def __call__(self, s: LoopState, f: Tensor | Routed, visit: Visit) -> LoopState:
        h, f = s.h, combine(f)
        if visit.sublayer.over_positions:
            h, f = h.transpose(1, 2), f.transpose(1, 2)
        h, _ = post_sandwich(h, f, None, None, self.scales.alpha, self.eps, norm=False)
        if visit.sublayer.over_positions:
            h = h.transpose(1, 2)
        n = self.input(h, visit.next_gain).to(f.dtype) if visit.norm else None
        return s._replace(h=h, n=n)

    def reference(self, s: LoopState, f: Tensor, visit: Visit) -> LoopState:
        h, axis = self.scales.alpha * s.h + f, 1 if visit.sublayer.over_positions else -1
        h = F.rms_norm(h.movedim(axis, -1), (h.shape[axis],), eps=self.eps)
        return s._replace(h=h.movedim(-1, axis))
