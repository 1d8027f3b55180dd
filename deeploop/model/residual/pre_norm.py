"""pre_norm: h' = h + f, with a norm before each branch.

Source: the pre-norm block (arXiv 2002.04745); the papers' looped baseline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from deeploop.kernels import pre_norm
from deeploop.model.moe.layer import Routed, combine
from deeploop.model.residual.base import Residual

if TYPE_CHECKING:
    from deeploop.model.state import LoopState, Visit


class PreNorm(Residual):
    """h' = h + f."""

    def __call__(self, s: LoopState, f: Tensor | Routed, visit: Visit) -> LoopState:
        h, n = pre_norm(s.h, combine(f), visit.next_gain, eps=self.eps, norm=visit.norm)
        return s._replace(h=h, n=n)

    def reference(self, s: LoopState, f: Tensor, visit: Visit) -> LoopState:
        return s._replace(h=s.h + f)
