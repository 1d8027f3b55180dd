"""pre_norm: residual add and the next sublayer's norm in one pass (fused_add_rms_norm).

    h' = h + scale * f
    n  = RMSNorm(h') * w_next

Forward, backward, dtypes and kernels are those of linear_update, without memories,
with a = 1 and c = scale; n is computed from the unrounded h'.

Bytes, in passes over [rows, d] (plus O(rows) statistics and O(d) gains):
forward 4 (reads h, f; writes h', n), backward 5 (reads dh', dn, h'; writes dh, df).
Saved for backward: h', which the next sublayer keeps anyway, w_next and one number per
row; without the norm nothing, and the passes are 3 and 3. At scale 1 and equal dtypes
dh and df are equal in value and one tensor could serve as both, for 4 passes; two are
written all the same, because a consumer that works in place on one of them would
change the other. Speed on a GPU: not yet measured.

Source: the pre-norm block (arXiv 2002.04745); scale = lambda / (R sqrt K) is
arXiv 2606.18524.
"""

from __future__ import annotations

from torch import Tensor

from ._checks import check_gains, check_norm, check_rows, check_untraced
from ._launch import Launch, LaunchConfig
from ._op import Normed
from .linear_update import linear_update
from .triton import linear_update as triton_code
from .triton.linear_update import Coefficients


def pre_norm(
    h: Tensor,
    f: Tensor,
    w_next: Tensor | None,
    scale: float = 1.0,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, Normed]:
    """Add a branch to the stream and norm the sum for the next sublayer.

    h' = h + scale * f,  n = RMSNorm(h') * w_next. With scale = 1 this is the operation
    known as fused_add_rms_norm (vLLM, Liger).

    Args:
        h: residual stream, [..., d], a float dtype.
        f: branch output, like h; may have another float dtype.
        w_next: gain of the next sublayer's norm, [d], or None for ones.
        scale: factor of the branch; a run-time number: no value compiles the kernel again.
        eps: added to the mean square under the root.
        norm: False leaves the norm out; w_next must then be None.

    Returns:
        h', shape and dtype of h, and n, shape of h and dtype of f (None if norm is False).

    Raises:
        InputError: if shapes, dtypes or devices disagree, or a number is not finite.

    Source: the pre-norm block (arXiv 2002.04745); depth-scaled branches (arXiv 2606.18524).
    """
    check_rows("pre_norm", h=h, f=f)
    check_gains("pre_norm", h, w_next=w_next)
    check_norm("pre_norm", norm, w_next)
    check_untraced("pre_norm", eps, scale=scale)
    h_new, _, _, n = linear_update(h, f, None, None, w_next, Coefficients(c=scale), eps, norm)
    return h_new, n


def aot_launches(
    x: Tensor, w: Tensor | None, config: LaunchConfig | None = None
) -> dict[str, Launch]:
    """Build every launch of the op, by name, on rows like x and gains like w (meta tensors)."""
    return triton_code.aot_launches("pre_norm", x, w, config=config)
