"""inject: a weighted sum of the stream and an input, and the next visit's norm, in one pass.

    h' = keep * h + add * x
    n  = RMSNorm(h') * w_next

keep = 1 - g_t, add = g_t is LOOM's re-injection of the embedding at the start of
loop t; keep = add = 1 is HRM's input addition. Forward, backward, dtypes and
kernels are those of linear_update, with no memories, a = keep and c = add.

Bytes, in passes over [rows, d] (beside O(rows) statistics and O(d) gains):
forward 4 (reads h, x; writes h', n), backward 5 (reads dh', dn, h'; writes dh,
dx); without the norm 3 and 3, with nothing saved. Speed on a GPU: not yet
measured.

Source: arXiv 2610.01153 (LOOM); arXiv 2506.21734 (HRM).
"""

from __future__ import annotations

from torch import Tensor

from . import rows
from .linear_update import linear_update
from .triton import linear_update as linear_kernels
from .triton.linear_update import Coefficients


def inject(
    h: Tensor,
    x: Tensor,
    w_next: Tensor | None,
    keep: float,
    add: float,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, rows.Normed]:
    """h' = keep * h + add * x ; n = RMSNorm(h') * w_next, or None where norm is off."""
    rows.check_rows("inject", h=h, x=x)
    rows.check_gains("inject", h, w_next=w_next)
    rows.check_norm("inject", norm, w_next)
    rows.check_untraced("inject", eps, keep=keep, add=add)
    k = Coefficients(a=keep, c=add)
    h_new, _, _, n = linear_update(h, x, None, None, w_next, k, eps, norm)
    return h_new, n


def aot_launches(
    x: Tensor, w: Tensor | None, config: rows.Config | None = None
) -> dict[str, rows.Launch]:
    """Every launch on rows like x and gains like w (meta tensors), by name."""
    return linear_kernels.aot_launches("inject", x, w, config=config)
