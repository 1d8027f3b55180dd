"""branch_sandwich: normed branch added to the stream, and the next sublayer's norm, in one pass.

Forward, per row of d values (w_* one gain per column, or None for all ones), with
fw = f * w_branch:

    h' = h + scale * fw * r1      r1 = 1 / sqrt(mean(f^2)  + eps)
    n  = h' * r2 * w_next         r2 = 1 / sqrt(mean(h'^2) + eps)

Backward, from dh' and dn (either may be None), with y1 = f * r1, y2 = h' * r2:

    m2 = mean(dn * w_next * y2)
    T  = dh' + r2 * (dn * w_next - y2 * m2)          total gradient of h'
    m1 = mean(T * w_branch * y1)
    dh = T                                           df = scale * r1 * (T * w_branch - y1 * m1)
    dw_branch = sum over rows of scale * T * y1      dw_next = ... of dn * y2

m1 needs m2, but no second pass over the row: sum(T * fw) is
sum((dh' + r2 * dn * w_next) * fw) - r2^2 * m2 * sum(h' * fw).

Shapes: h, f [..., d]; gains [d]; h' and n like h. Dtypes: h' as h, n as f, each
gradient as its tensor; arithmetic in float32 (float64 if any input is), with n
computed from the unrounded h'. scale and eps are data: no value compiles the kernel again.

Bytes, in passes over [rows, d] (plus O(rows) statistics and O(d) gains):
forward 4 (reads h, f; writes h', n), backward 6 (reads dh', dn, h, f; writes dh,
df). Saved for backward: h, f, the gains, r1 and r2. h' is computed again from h and f
and not saved, because the previous sublayer's update already keeps h alive. Without
the norm forward is 3 passes and backward 4, and f, the gain and r1 are saved.

The gradients of the gains are accumulated as in post_sandwich: float32 partial sums,
no atomics. Up to d = 2048 the backward keeps the row in registers; wider rows are
read twice, in chunks, the second time from L1 or L2, and above d = 8192 two programs
share a row. Speed on a GPU: not yet measured.

Source: arXiv 2610.01153 (LOOM), the MoE branch with scale = gamma; arXiv
2510.25741 (Ouro), scale = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _aten
from ._checks import check_gains, check_norm, check_numbers, check_rows
from ._launch import uses_triton
from ._op import Normed, Saved, as_data, define, fake_gradients, fake_update, run
from .triton.branch_sandwich import aot_launches, backward_launch, forward_launch

__all__ = ["aot_launches", "branch_sandwich"]


def branch_sandwich(
    h: Tensor,
    f: Tensor,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    scale: float,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, Normed]:
    """Norm a branch, add it to the stream, and norm the sum for the next sublayer.

    h' = h + scale * RMSNorm(f) * w_branch,  n = RMSNorm(h') * w_next.

    Args:
        h: residual stream, [..., d], a float dtype.
        f: branch output, like h; may have another float dtype.
        w_branch: gain of the branch norm, [d], or None for ones.
        w_next: gain of the next sublayer's norm, [d], or None for ones.
        scale: factor of the normed branch; a run-time number: no value compiles the kernel again.
        eps: added to the mean square under both roots.
        norm: False leaves the second norm out; w_next must then be None.

    Returns:
        h', shape and dtype of h, and n, shape of h and dtype of f (None if norm is False).

    Raises:
        InputError: if shapes, dtypes or devices disagree, or a number is not finite.

    Source: LOOM's MoE branch (arXiv 2610.01153) with scale = gamma; Ouro (arXiv 2510.25741)
    with scale = 1. The field also calls it peri-norm (arXiv 2502.02732).
    """
    check_rows("branch_sandwich", h=h, f=f)
    check_gains("branch_sandwich", h, w_branch=w_branch, w_next=w_next)
    check_norm("branch_sandwich", norm, w_next)
    h_new, n, _, _ = _forward(h, f, w_branch, w_next, as_data(scale, eps), norm)
    return h_new, n if norm else None


# ---------------------------------------------------------------------------
# PyTorch closed form: the CPU path


def _forward_torch(
    h: Tensor,
    f: Tensor,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    scale: float,
    eps: float,
    norm: bool,
) -> tuple[Tensor | None, ...]:
    dtype = _aten.compute_dtype(h, f, w_branch, w_next)
    fw = f.to(dtype)
    r1 = _aten.rstd(fw, eps)
    fw = fw if w_branch is None else fw * w_branch
    h_new = torch.addcmul(h.to(dtype), fw, r1, value=scale)
    if not norm:
        return h_new.to(h.dtype), None, r1.view(-1), None
    r2 = _aten.rstd(h_new, eps)
    n = h_new * r2
    if w_next is not None:
        n.mul_(w_next)
    return h_new.to(h.dtype), n.to(f.dtype), r1.view(-1), r2.view(-1)


def _backward_torch(
    dh_new: Tensor | None,
    dn: Tensor | None,
    h: Tensor | None,
    f: Tensor,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    r1: Tensor,
    r2: Tensor | None,
    scale: float,
    h_dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    """Compute dh, df, dw_branch, dw_next; folds gains into row scalars where that saves a pass."""
    dtype, d = r1.dtype, f.shape[-1]
    need_h, need_f, need_branch, need_next = needs
    df = dw_branch = dw_next = None
    z, r1 = f.to(dtype), r1[:, None]
    total = None if dh_new is None else dh_new.to(dtype)
    if dn is not None:
        assert h is not None and r2 is not None
        fw = z if w_branch is None else z * w_branch
        h_new, r2 = torch.addcmul(h.to(dtype), fw, r1, value=scale), r2[:, None]
        dn = dn.to(dtype)
        product = dn * h_new
        if need_next and w_next is not None:
            dw_next = _aten.column_sum(product, r2, w_next.dtype)
        mean_2 = _aten.row_sum(product, w_next) * (r2 / d)
        normed = dn * r2 if w_next is None else torch.mul(dn, w_next, out=product).mul_(r2)
        normed.addcmul_(h_new, mean_2 * (r2 * r2), value=-1)
        total = normed if total is None else normed.add_(total)
    assert total is not None, "the autograd formula passes dh_new or dn"
    if need_branch or need_f:
        product = total * z
        if need_branch and w_branch is not None:
            dw_branch = _aten.column_sum(product, r1 * scale, w_branch.dtype)
        if need_f:
            mean_1 = _aten.row_sum(product, w_branch) * (r1 * r1 / d)
            dz = total.clone() if w_branch is None else total * w_branch
            df = dz.addcmul_(z, mean_1, value=-1).mul_(r1 * scale).to(f.dtype)
    # Without dn, total is the incoming gradient itself, and an output must not alias
    # an input.
    dh = total.to(h_dtype, copy=dn is None) if need_h else None
    return dh, df, dw_branch, dw_next


# ---------------------------------------------------------------------------
# The op


def _run_forward(h, f, w_branch, w_next, numbers, norm):
    """Compute h', n, r1, r2; the last two are [rows], n and r2 None without the norm."""
    scale, eps = numbers.tolist()
    check_numbers("branch_sandwich", eps, scale=scale)
    tensors = (*_aten.as_rows(h, f), *_aten.packed(w_branch, w_next))
    fused = uses_triton(*tensors)
    h_new, n, *stats = run(fused, h, forward_launch, _forward_torch, *tensors, scale, eps, norm)
    return *_aten.view_as(h.shape, h_new, n), *stats


def _run_backward(dh_new, dn, h, f, w_branch, w_next, r1, r2, numbers, h_dtype, needs):
    if dn is None:
        h = r2 = None
    tensors = (*_aten.as_rows(dh_new, dn, h, f), *_aten.packed(w_branch, w_next))
    wanted = [*needs[:3], needs[3] and dn is not None]
    args = (*tensors, r1, r2, numbers[0].item(), h_dtype, wanted)
    dh, df, *gains = run(uses_triton(f, r1), f, backward_launch, _backward_torch, *args)
    return *_aten.view_as(f.shape, dh, df), *map(_aten.gain_gradient, gains, tensors[4:], needs[2:])


def _fake(h, f, w_branch, w_next, numbers, norm):
    return fake_update(h, f, _aten.compute_dtype(h, f, w_branch, w_next), norm)


def _fake_backward(dh_new, dn, h, f, w_branch, w_next, r1, r2, numbers, h_dtype, needs):
    return fake_gradients(needs, f.new_empty(f.shape, dtype=h_dtype), f, w_branch, w_next)


def _save(inputs, output):
    h, f, w_branch, w_next, numbers, norm = inputs
    _, _, r1, r2 = output
    h_saved, r2 = (h, r2) if norm else (None, None)
    return Saved((h_saved, f, w_branch, w_next, r1, r2, numbers), (h.dtype,))


_forward, _backward = define(
    "branch_sandwich",
    arguments="Tensor h, Tensor f, Tensor? w_branch, Tensor? w_next, Tensor numbers, bool norm",
    results=("h_new", "n", "r1", "r2"),
    gradients_from=("h_new", "n"),
    gradients_for=("h", "f", "w_branch", "w_next"),
    forward=_run_forward,
    fake=_fake,
    save=_save,
    backward_arguments="Tensor? dh_new, Tensor? dn, Tensor? h, Tensor f, Tensor? w_branch, "
    "Tensor? w_next, Tensor r1, Tensor? r2, Tensor numbers, ScalarType h_dtype, bool[] needs",
    backward=_run_backward,
    backward_fake=_fake_backward,
)
