"""post_norm: h' = RMSNorm(h + f) * gain_out, with no norm before a branch.

The branches read the stream itself: n = h'.

Source: the post-norm block (arXiv 1706.03762), as in the Universal Transformer
(arXiv 1807.03819) and HRM (arXiv 2506.21734, without gains). RMSNorm stands for LayerNorm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from deeploop.kernels import post_sandwich
from deeploop.model.moe.layer import Routed, combine
from deeploop.model.residual.base import Residual

if TYPE_CHECKING:
    from deeploop.model.state import LoopState, Visit


class PostNorm(Residual):
    """h' = RMSNorm(h + f) * gain_out."""

    final_gain = norms_input = False

    def gains(self, kind: str) -> tuple[bool, bool]:
        return False, True

    def __call__(self, s: LoopState, f: Tensor | Routed, visit: Visit) -> LoopState:
        f = combine(f)
        h, _ = post_sandwich(s.h, f, visit.sublayer.gain_out, None, 1.0, self.eps, norm=False)
        return s._replace(h=h, n=self.input(h, visit.next_gain).to(f.dtype))

    def reference(self, s: LoopState, f: Tensor, visit: Visit) -> LoopState:
        h = s.h + f
        return s._replace(h=F.rms_norm(h, h.shape[-1:], visit.sublayer.gain_out, self.eps))
