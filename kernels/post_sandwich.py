"""post_sandwich: scaled residual add, norm, and the next visit's norm in one pass.

Forward, per row of d values (w_* one gain per column, or None for all ones):

    z  = alpha * h + f
    h' = z * r1 * w_out           r1 = 1 / sqrt(mean(z^2)  + eps)
    n  = h' * r2 * w_next         r2 = 1 / sqrt(mean(h'^2) + eps)

Backward, from dh' and dn (either may be missing), with y1 = z * r1, y2 = h' * r2:

    m2 = mean(dn * w_next * y2)
    T  = dh' + r2 * (dn * w_next - y2 * m2)          all that reaches h'
    m1 = mean(T * h') = mean(dh' * h') + m2 * eps * r2^2
    df = r1 * (T * w_out - y1 * m1)                  dh = alpha * df
    dw_out = sum over rows of T * y1                 dw_next = ... of dn * y2

The second form of m1 needs neither T nor m2 column by column, because
mean(h'^2) = 1 / r2^2 - eps: both row sums come out of one sweep over the row.

Shapes: h, f [..., d]; gains [d]; h' and n like h. Dtypes: h' as h, n as f, each
gradient as its tensor; arithmetic float32 (float64 if any input is), and n from
the unrounded h'. alpha and eps are data: no new value recompiles anything.

Bytes, in passes over [rows, d] (beside O(rows) statistics and O(d) gains):
forward 4 (reads h, f; writes h', n), backward 6 (reads dh', dn, h, f; writes dh,
df); without the second norm 3 and 5. These are floors for an op that saves h and
f. Saving h' instead would drop a read and a saved tensor, but divides by w_out,
which may be zero.

The backward adds up dw_out and dw_next in registers over all rows a program
visits, writes them once, [programs, d] in float32, and leaves the sum over
programs to torch.sum: no atomics, the same bits every run. Up to d = 2048 the
row sits in registers beside them. Wider rows do not fit, and are read twice, in
chunks: once for the two row sums, once for the gradients. A row is at most 4 * d
values and the same program reads it again at once, so the second read comes out
of L1 or L2: still 6 passes of memory. (One kernel for dh and df and another for
the gains would read everything again from memory: 10 passes.) Above 8192 two
programs share a row, each summing all of it and writing half, so 4 more passes
come out of L2 as long as the two run side by side, which adjacent program
numbers make likely. Speed on a GPU: not yet measured.

Source: arXiv 2607.13491 (DeepLoop), eq. 3.1, with the next visit's norm fused;
DeepNorm (arXiv 2203.00555) and Huginn (arXiv 2502.05171, alpha = 1) are the same
update.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rows
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
) -> tuple[Tensor, rows.Normed]:
    """h' = RMSNorm(alpha * h + f) * w_out ; n = RMSNorm(h') * w_next, None if norm is off."""
    rows.check_rows("post_sandwich", h=h, f=f)
    rows.check_gains("post_sandwich", h, w_out=w_out, w_next=w_next)
    rows.check_norm("post_sandwich", norm, w_next)
    h_new, n, _, _ = _forward(h, f, w_out, w_next, rows.numbers(alpha, eps), norm)
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
    dtype = rows.compute_dtype(h, f, w_out, w_next)
    z = torch.add(f.to(dtype), h.to(dtype), alpha=alpha)
    zw = z if w_out is None else z * w_out
    r1 = rows.rstd(z, eps)
    if not norm:
        return (zw * r1).to(h.dtype), None, r1.view(-1), None
    r2 = rows.rstd(zw, eps, r1)
    n = zw * (r1 * r2)
    if w_next is not None:
        n.mul_(w_next)
    h_new = zw.mul_(r1)
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
    """dh, df, dw_out, dw_next; gains are folded into row scalars where that saves a pass."""
    dtype, d = rows.compute_dtype(h, f, w_out, w_next), h.shape[-1]
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
            dw_next = rows.column_sum(product, r1 * r2, w_next.dtype)
        mean_2 = rows.row_sum(product, w_next) * (r1 * r2 / d)
        mean_1 = mean_2 * (eps * r2 * r2)
        total = dn * r2 if w_next is None else torch.mul(dn, w_next, out=product).mul_(r2)
        total.addcmul_(zw, mean_2 * (r1 * r2 * r2), value=-1)
    if dh_new is not None:
        dh_new = dh_new.to(dtype)
        mean_1 = torch.addcmul(mean_1, (dh_new * zw).sum(-1, keepdim=True), r1 / d)
        total = dh_new if total is None else total.add_(dh_new)
    assert total is not None, "the autograd formula calls this with dh_new or dn"
    if need_out and w_out is not None:
        dw_out = rows.column_sum(total * z, r1, w_out.dtype)
    if need_h or need_f:
        dz = total * r1 if w_out is None else (total * w_out).mul_(r1)
        dz.addcmul_(z, mean_1 * (r1 * r1), value=-1)
        dh = (dz * alpha).to(h.dtype) if need_h else None
        df = dz.to(f.dtype) if need_f else None
    return dh, df, dw_out, dw_next


# ---------------------------------------------------------------------------
# The op


@torch.library.custom_op("deeploop::post_sandwich", mutates_args=())
def _forward(
    h: Tensor,
    f: Tensor,
    w_out: Tensor | None,
    w_next: Tensor | None,
    numbers: Tensor,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> h', n, r1, r2 (the last two [rows], for the backward); n and r2 empty without the norm."""
    alpha, eps = numbers.tolist()
    rows.check_numbers("post_sandwich", eps, alpha=alpha)
    shape, h, f = h.shape, rows.as_rows(h), rows.as_rows(f)
    w_out, w_next = rows.packed(w_out), rows.packed(w_next)
    fused = rows.uses_triton(h, f, w_out, w_next)
    args = (h, f, w_out, w_next, alpha, eps, norm)
    h_new, n, r1, r2 = rows.results(h, fused, forward_launch, _forward_torch, *args)
    n = f.new_empty(0) if n is None else n.view(shape)
    return h_new.view(shape), n, r1, r1.new_empty(0) if r2 is None else r2


@_forward.register_fake
def _(h, f, w_out, w_next, numbers, norm):
    r1 = h.new_empty((rows.count(h),), dtype=rows.compute_dtype(h, f, w_out, w_next))
    n = f.new_empty(f.shape if norm else (0,))
    return h.new_empty(h.shape), n, r1, torch.empty_like(r1) if norm else r1.new_empty(0)


@torch.library.custom_op("deeploop::post_sandwich_backward", mutates_args=())
def _backward(
    dh_new: Tensor | None,
    dn: Tensor | None,
    h: Tensor,
    f: Tensor,
    w_out: Tensor | None,
    w_next: Tensor | None,
    r1: Tensor,
    r2: Tensor,
    numbers: Tensor,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients asked for, in the order h, f, w_out, w_next."""
    shape, h, f = h.shape, rows.as_rows(h), rows.as_rows(f)
    dh_new, dn = rows.maybe_rows(dh_new), rows.maybe_rows(dn)
    w_out, w_next = rows.packed(w_out), rows.packed(w_next)
    fused = rows.uses_triton(h, f, w_out, w_next)
    args = (dh_new, dn, h, f, w_out, w_next, r1, r2, *numbers.tolist(), needs)
    dh, df, *gains = rows.results(h, fused, backward_launch, _backward_torch, *args)
    gains = map(rows.gain_gradient, gains, (w_out, w_next), needs[2:])
    return rows.found(shape, dh, df) + rows.found(None, *gains)


@_backward.register_fake
def _(dh_new, dn, h, f, w_out, w_next, r1, r2, numbers, needs):
    inputs = (h, f, w_out, w_next)
    return [x.new_empty(x.shape) for x, need in zip(inputs, needs, strict=True) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, f, w_out, w_next, numbers, norm = inputs
    _, n, r1, r2 = output
    # Without dn, r2 scales only zeros, and any finite number does.
    ctx.save_for_backward(h, f, w_out, w_next, r1, r2 if norm else r1, numbers)
    ctx.mark_non_differentiable(r1, r2, *(() if norm else (n,)))
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh_new: Tensor | None, dn: Tensor | None, *_: None) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:4])
    if dh_new is None and dn is None:
        return (None,) * 6
    found = iter(_backward(dh_new, dn, *ctx.saved_tensors, needs))
    return (*(next(found) if need else None for need in needs), None, None)


_forward.register_autograd(_gradients, setup_context=_save)
