"""pre_norm: residual add and the next visit's norm in one pass.

    h' = h + scale * f
    n  = RMSNorm(h') * w_next

Forward, backward, dtypes and kernels are those of linear_update, with no memories,
a = 1 and c = scale; n comes from the unrounded h'.

Bytes, in passes over [rows, d] (beside O(rows) statistics and O(d) gains):
forward 4 (reads h, f; writes h', n), backward 5 (reads dh', dn, h'; writes dh,
df). Only h', which the next visit holds anyway, and one number per row are saved;
without the norm it is 3 and 3, with nothing saved. At scale 1 and equal dtypes dh
and df are equal in value and one tensor could serve as both, for 4 passes; they are
written separately all the same, because a consumer that works in place on one of
them would change the other. Speed on a GPU: not yet measured.

Source: the pre-norm block (arXiv 2002.04745); scale = lambda / (R sqrt K) is
arXiv 2606.18524.
"""

from __future__ import annotations

from torch import Tensor

from . import rows
from .linear_update import linear_update
from .triton import linear_update as linear_kernels
from .triton.linear_update import Coefficients


def pre_norm(
    h: Tensor,
    f: Tensor,
    w_next: Tensor | None,
    scale: float = 1.0,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, rows.Normed]:
    """h' = h + scale * f ; n = RMSNorm(h') * w_next, or None where norm is off."""
    rows.check_rows("pre_norm", h=h, f=f)
    rows.check_gains("pre_norm", h, w_next=w_next)
    rows.check_norm("pre_norm", norm, w_next)
    rows.check_untraced("pre_norm", eps, scale=scale)
    h_new, _, _, n = linear_update(h, f, None, None, w_next, Coefficients(c=scale), eps, norm)
    return h_new, n


def aot_launches(
    x: Tensor, w: Tensor | None, config: rows.Config | None = None
) -> dict[str, rows.Launch]:
    """Every launch on rows like x and gains like w (meta tensors), by name."""
    return linear_kernels.aot_launches("pre_norm", x, w, config=config)
