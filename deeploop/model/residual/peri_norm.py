"""peri_norm: h' = h + RMSNorm(f) * gain_out, with a norm before each branch, too.

Source: Ouro, arXiv 2510.25741 (norms before and after each branch; the stream itself is not
normed inside a loop).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from deeploop.kernels import branch_sandwich
from deeploop.model.moe.layer import Routed, combine
from deeploop.model.residual.base import Residual

if TYPE_CHECKING:
    from deeploop.model.state import LoopState, Visit


class PeriNorm(Residual):
    """h' = h + RMSNorm(f) * gain_out."""

    def gains(self, kind: str) -> tuple[bool, bool]:
        return True, True

    def __call__(self, s: LoopState, f: Tensor | Routed, visit: Visit) -> LoopState:
        gain = visit.sublayer.gain_out
        h, n = branch_sandwich(
            s.h, combine(f), gain, visit.next_gain, 1.0, self.eps, norm=visit.norm
        )
        return s._replace(h=h, n=n)

    def reference(self, s: LoopState, f: Tensor, visit: Visit) -> LoopState:
        f = F.rms_norm(f, f.shape[-1:], visit.sublayer.gain_out, self.eps)
        return s._replace(h=s.h + f)
