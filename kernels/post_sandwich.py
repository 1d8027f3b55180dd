"""post_sandwich: scaled residual add, norm, and the next sublayer's norm in one pass.

Forward, per row of d values (w_* one gain per column, or None for all ones):

    z  = alpha * h + f
    h' = z * r1 * w_out           r1 = 1 / sqrt(mean(z^2)  + eps)
    n  = h' * r2 * w_next         r2 = 1 / sqrt(mean(h'^2) + eps)

Backward, from dh' and dn (either may be None), with y1 = z * r1, y2 = h' * r2:

    m2 = mean(dn * w_next * y2)
    T  = dh' + r2 * (dn * w_next - y2 * m2)          total gradient of h'
    m1 = mean(T * h') = mean(dh' * h') + m2 * eps * r2^2
    df = r1 * (T * w_out - y1 * m1)                  dh = alpha * df
    dw_out = sum over rows of T * y1                 dw_next = ... of dn * y2

The second form of m1 needs neither T nor m2 column by column, because
mean(h'^2) = 1 / r2^2 - eps: one pass over the row gives both row sums.

Shapes: h, f [..., d]; gains [d]; h' and n like h. Dtypes: h' as h, n as f, each
gradient as its tensor; arithmetic in float32 (float64 if any input is), with n
computed from the unrounded h'. alpha and eps are data: no value compiles the kernel again.

Bytes, in passes over [rows, d] (plus O(rows) statistics and O(d) gains):
forward 4 (reads h, f; writes h', n), backward 6 (reads dh', dn, h, f; writes dh,
df); without the second norm 3 and 5. These are the least an op that saves h and f
can move. Saving h' instead would drop a read and a saved tensor, but would divide
by w_out, which may be zero.

Saved for backward: h, f, the gains, r1 and r2.

The backward accumulates dw_out and dw_next in registers over all rows that a program
processes, writes them once as float32 partial sums [programs, d], and torch.sum adds
these: no atomics, the same bits every run. Up to d = 2048 the row itself also stays in
registers. Wider rows do not fit and are read twice, in chunks: once for the two row
sums, once for the gradients. The same program reads the row again at once and a row
is at most 4 * d values, so the second read hits L1 or L2: still 6 passes over memory.
(One kernel for dh and df and another for the gains would take 10.) Above d = 8192 two
programs share a row; each sums all of it and writes half, so 4 more passes hit L2 as
long as the two run side by side, which adjacent program numbers make likely. Speed on
a GPU: not yet measured.

Source: arXiv 2607.13491 (DeepLoop), eq. 3.1, with the next visit's norm fused;
DeepNorm (arXiv 2203.00555) and Huginn (arXiv 2502.05171, alpha = 1) are the same
update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _aten
from ._checks import check_gains, check_norm, check_numbers, check_rows
from ._launch import uses_triton
from ._op import Normed, Saved, as_data, define, fake_gradients, fake_update, run
from .triton.post_sandwich import aot_launches, backward_launch, forward_launch

__all__ = ["aot_launches", "post_sandwich"]


def post_sandwich(
    h: Tensor,
    f: Tensor,
    w_out: Tensor | None,
    w_next: Tensor | None,
    alpha: float,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, Normed]:
    """Add a branch to the scaled stream, norm it, and norm it again for the next sublayer.

    h' = RMSNorm(alpha * h + f) * w_out,  n = RMSNorm(h') * w_next.

    Args:
        h: residual stream, [..., d], a float dtype.
        f: branch output, like h; may have another float dtype.
        w_out: gain of the post norm, [d], or None for ones.
        w_next: gain of the next sublayer's norm, [d], or None for ones.
        alpha: scale of the stream; a run-time number: no value compiles the kernel again.
        eps: added to the mean square under both roots.
        norm: False leaves the second norm out; w_next must then be None.

    Returns:
        h', shape and dtype of h, and n, shape of h and dtype of f (None if norm is False).

    Raises:
        InputError: if shapes, dtypes or devices disagree, or a number is not finite.

    Source: DeepLoop (arXiv 2607.13491) eq. 3.1, DeepNorm (arXiv 2203.00555), and Huginn
    (arXiv 2502.05171) with alpha = 1.
    """
    check_rows("post_sandwich", h=h, f=f)
    check_gains("post_sandwich", h, w_out=w_out, w_next=w_next)
    check_norm("post_sandwich", norm, w_next)
    h_new, n, _, _ = _forward(h, f, w_out, w_next, as_data(alpha, eps), norm)
    return h_new, n if norm else None


# ---------------------------------------------------------------------------
# PyTorch closed form: the CPU path


def _forward_torch(
    h: Tensor,
    f: Tensor,
    w_out: Tensor | None,
    w_next: Tensor | None,
    alpha: float,
    eps: float,
    norm: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    dtype = _aten.compute_dtype(h, f, w_out, w_next)
    z = torch.add(f.to(dtype), h.to(dtype), alpha=alpha)
    r1 = _aten.rstd(z, eps)
    h_new = z.mul_(r1)
    if w_out is not None:
        h_new.mul_(w_out)
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
    h: Tensor,
    f: Tensor,
    w_out: Tensor | None,
    w_next: Tensor | None,
    r1: Tensor,
    r2: Tensor,
    alpha: float,
    eps: float,
    needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Compute dh, df, dw_out, dw_next; folds gains into row scalars where that saves a pass."""
    dtype, d = _aten.compute_dtype(h, f, w_out, w_next), h.shape[-1]
    need_h, need_f, need_out, need_next = needs
    dh = df = dw_out = dw_next = None
    z = torch.add(f.to(dtype), h.to(dtype), alpha=alpha)
    zw = z if w_out is None else z * w_out
    r1, r2 = r1[:, None], r2[:, None]
    mean_1 = torch.zeros_like(r1)
    total = None
    if dn is not None:
        dn = dn.to(dtype)
        product = dn * zw
        if need_next and w_next is not None:
            dw_next = _aten.column_sum(product, r1 * r2, w_next.dtype)
        mean_2 = _aten.row_sum(product, w_next) * (r1 * r2 / d)
        mean_1 = mean_2 * (eps * r2 * r2)
        total = dn * r2 if w_next is None else torch.mul(dn, w_next, out=product).mul_(r2)
        total.addcmul_(zw, mean_2 * (r1 * r2 * r2), value=-1)
    if dh_new is not None:
        dh_new = dh_new.to(dtype)
        mean_1 = torch.addcmul(mean_1, (dh_new * zw).sum(-1, keepdim=True), r1 / d)
        total = dh_new if total is None else total.add_(dh_new)
    assert total is not None, "the autograd formula passes dh_new or dn"
    if need_out and w_out is not None:
        dw_out = _aten.column_sum(total * z, r1, w_out.dtype)
    if need_h or need_f:
        dz = total * r1 if w_out is None else (total * w_out).mul_(r1)
        dz.addcmul_(z, mean_1 * (r1 * r1), value=-1)
        dh = (dz * alpha).to(h.dtype) if need_h else None
        df = dz.to(f.dtype) if need_f else None
    return dh, df, dw_out, dw_next


# ---------------------------------------------------------------------------
# The op


def _run_forward(h, f, w_out, w_next, numbers, norm):
    """Compute h', n, r1, r2; the last two are [rows], n and r2 None without the norm."""
    alpha, eps = numbers.tolist()
    check_numbers("post_sandwich", eps, alpha=alpha)
    tensors = (*_aten.as_rows(h, f), *_aten.packed(w_out, w_next))
    fused = uses_triton(*tensors)
    h_new, n, *stats = run(fused, h, forward_launch, _forward_torch, *tensors, alpha, eps, norm)
    return *_aten.view_as(h.shape, h_new, n), *stats


def _run_backward(dh_new, dn, h, f, w_out, w_next, r1, r2, numbers, needs):
    tensors = (*_aten.as_rows(h, f), *_aten.packed(w_out, w_next))
    args = (*_aten.as_rows(dh_new, dn), *tensors, r1, r2, *numbers.tolist(), needs)
    fused = uses_triton(*tensors)
    dh, df, *gains = run(fused, h, backward_launch, _backward_torch, *args)
    return *_aten.view_as(h.shape, dh, df), *map(_aten.gain_gradient, gains, tensors[2:], needs[2:])


def _fake(h, f, w_out, w_next, numbers, norm):
    return fake_update(h, f, _aten.compute_dtype(h, f, w_out, w_next), norm)


def _fake_backward(dh_new, dn, h, f, w_out, w_next, r1, r2, numbers, needs):
    return fake_gradients(needs, h, f, w_out, w_next)


def _save(inputs, output):
    h, f, w_out, w_next, numbers, norm = inputs
    _, _, r1, r2 = output
    # Without dn, r2 scales only zeros, and any finite number does.
    return Saved((h, f, w_out, w_next, r1, r2 if norm else r1, numbers))


_forward, _backward = define(
    "post_sandwich",
    arguments="Tensor h, Tensor f, Tensor? w_out, Tensor? w_next, Tensor numbers, bool norm",
    results=("h_new", "n", "r1", "r2"),
    gradients_from=("h_new", "n"),
    gradients_for=("h", "f", "w_out", "w_next"),
    forward=_run_forward,
    fake=_fake,
    save=_save,
    backward_arguments="Tensor? dh_new, Tensor? dn, Tensor h, Tensor f, Tensor? w_out, "
    "Tensor? w_next, Tensor r1, Tensor r2, Tensor numbers, bool[] needs",
    backward=_run_backward,
    backward_fake=_fake_backward,
)
