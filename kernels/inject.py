"""inject: a weighted sum of the stream and an input, and the next sublayer's norm, in one pass.

    h' = keep * h + add * x
    n  = RMSNorm(h') * w_next

Forward, backward, dtypes and kernels are those of linear_update, without memories,
with a = keep and c = add.

Bytes, in passes over [rows, d] (plus O(rows) statistics and O(d) gains):
forward 4 (reads h, x; writes h', n), backward 5 (reads dh', dn, h'; writes dh, dx).
Saved for backward: h', w_next and one number per row; without the norm nothing, and
the passes are 3 and 3. Speed on a GPU: not yet measured.

Source: arXiv 2610.01153 (LOOM); arXiv 2506.21734 (HRM).
"""

from __future__ import annotations

from torch import Tensor

from ._checks import check_gains, check_norm, check_rows, check_untraced
from ._launch import Launch, LaunchConfig
from ._op import Normed
from .linear_update import linear_update
from .triton import linear_update as triton_code
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
) -> tuple[Tensor, Normed]:
    """Mix an input into the stream and norm the sum for the next sublayer.

    h' = keep * h + add * x,  n = RMSNorm(h') * w_next.

    Args:
        h: residual stream, [..., d], a float dtype.
        x: input to mix in (the embedding), like h; may have another float dtype.
        w_next: gain of the next sublayer's norm, [d], or None for ones.
        keep: factor of h; a run-time number: no value compiles the kernel again.
        add: factor of x, likewise.
        eps: added to the mean square under the root.
        norm: False leaves the norm out; w_next must then be None.

    Returns:
        h', shape and dtype of h, and n, shape of h and dtype of x (None if norm is False).

    Raises:
        InputError: if shapes, dtypes or devices disagree, or a number is not finite.

    Source: LOOM (arXiv 2610.01153), which re-injects the embedding at the start of loop t
    with keep = 1 - g_t and add = g_t; HRM (arXiv 2506.21734) adds its input, keep = add = 1.
    """
    check_rows("inject", h=h, x=x)
    check_gains("inject", h, w_next=w_next)
    check_norm("inject", norm, w_next)
    check_untraced("inject", eps, keep=keep, add=add)
    k = Coefficients(a=keep, c=add)
    h_new, _, _, n = linear_update(h, x, None, None, w_next, k, eps, norm)
    return h_new, n


def aot_launches(
    x: Tensor, w: Tensor | None, config: LaunchConfig | None = None
) -> dict[str, Launch]:
    """Build every launch of the op, by name, on rows like x and gains like w (meta tensors)."""
    return triton_code.aot_launches("inject", x, w, config=config)
