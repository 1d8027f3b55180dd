"""branch_sandwich: a normed branch added to the stream, and the next visit's norm, in one pass.

Forward, per row of d values (w_* one gain per column, or None for all ones), with
fw = f * w_branch:

    h' = h + scale * fw * r1      r1 = 1 / sqrt(mean(f^2)  + eps)
    n  = h' * r2 * w_next         r2 = 1 / sqrt(mean(h'^2) + eps)

Backward, from dh' and dn (either may be missing), with y1 = f * r1, y2 = h' * r2:

    m2 = mean(dn * w_next * y2)
    T  = dh' + r2 * (dn * w_next - y2 * m2)          all that reaches h'
    m1 = mean(T * w_branch * y1)
    dh = T                                           df = scale * r1 * (T * w_branch - y1 * m1)
    dw_branch = sum over rows of scale * T * y1      dw_next = ... of dn * y2

m1 needs m2, but not a second sweep for it: sum(T * fw) is
sum((dh' + r2 * dn * w_next) * fw) - r2^2 * m2 * sum(h' * fw).

Shapes: h, f [..., d]; gains [d]; h' and n like h. Dtypes: h' as h, n as f, each
gradient as its tensor; arithmetic float32 (float64 if any input is), and n from
the unrounded h'. scale and eps are data: no new value recompiles anything.

Bytes, in passes over [rows, d] (beside O(rows) statistics and O(d) gains):
forward 4 (reads h, f; writes h', n), backward 6 (reads dh', dn, h, f; writes dh,
df). h and f are saved, and h' is made again from them: it is not saved, because h
is what the visit before holds anyway. Without the norm forward is 3 passes and
backward 4, with f alone saved.

The gains' gradients are added up as in post_sandwich: float32 partial sums, no
atomics. Up to d = 2048 the backward holds the row in registers; wider rows are
read twice, in chunks, the second time out of L1 or L2, and above 8192 two
programs share a row. Speed on a GPU: not yet measured.

Source: arXiv 2610.01153 (LOOM), the MoE branch with scale = gamma; arXiv
2510.25741 (Ouro), scale = 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rows
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
) -> tuple[Tensor, rows.Normed]:
    """h' = h + scale * RMSNorm(f) * w_branch ; n = RMSNorm(h') * w_next, None if norm is off."""
    rows.check_rows("branch_sandwich", h=h, f=f)
    rows.check_gains("branch_sandwich", h, w_branch=w_branch, w_next=w_next)
    rows.check_norm("branch_sandwich", norm, w_next)
    h_new, n, _, _ = _forward(h, f, w_branch, w_next, rows.numbers(scale, eps), norm)
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
    dtype = rows.compute_dtype(h, f, w_branch, w_next)
    fw = f.to(dtype)
    r1 = rows.rstd(fw, eps)
    fw = fw if w_branch is None else fw * w_branch
    h_new = torch.addcmul(h.to(dtype), fw, r1, value=scale)
    if not norm:
        return h_new.to(h.dtype), None, r1.view(-1), None
    r2 = rows.rstd(h_new, eps)
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
    """dh, df, dw_branch, dw_next; gains are folded into row scalars where that saves a pass."""
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
            dw_next = rows.column_sum(product, r2, w_next.dtype)
        mean_2 = rows.row_sum(product, w_next) * (r2 / d)
        normed = dn * r2 if w_next is None else torch.mul(dn, w_next, out=product).mul_(r2)
        normed.addcmul_(h_new, mean_2 * (r2 * r2), value=-1)
        total = normed if total is None else normed.add_(total)
    assert total is not None, "the autograd formula calls this with dh_new or dn"
    if need_branch or need_f:
        product = total * z
        if need_branch and w_branch is not None:
            dw_branch = rows.column_sum(product, r1 * scale, w_branch.dtype)
        if need_f:
            mean_1 = rows.row_sum(product, w_branch) * (r1 * r1 / d)
            dz = total.clone() if w_branch is None else total * w_branch
            df = dz.addcmul_(z, mean_1, value=-1).mul_(r1 * scale).to(f.dtype)
    # With no norm to go through, total is the gradient that came in, and an output
    # must not alias an input.
    dh = total.to(h_dtype, copy=dn is None) if need_h else None
    return dh, df, dw_branch, dw_next


# ---------------------------------------------------------------------------
# The op


@torch.library.custom_op("deeploop::branch_sandwich", mutates_args=())
def _forward(
    h: Tensor,
    f: Tensor,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    numbers: Tensor,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> h', n, r1, r2 (the last two [rows], for the backward); n and r2 empty without the norm."""
    scale, eps = numbers.tolist()
    rows.check_numbers("branch_sandwich", eps, scale=scale)
    shape, h, f = h.shape, rows.as_rows(h), rows.as_rows(f)
    w_branch, w_next = rows.packed(w_branch), rows.packed(w_next)
    fused = rows.uses_triton(h, f, w_branch, w_next)
    args = (h, f, w_branch, w_next, scale, eps, norm)
    h_new, n, r1, r2 = rows.results(h, fused, forward_launch, _forward_torch, *args)
    n = f.new_empty(0) if n is None else n.view(shape)
    return h_new.view(shape), n, r1, r1.new_empty(0) if r2 is None else r2


@_forward.register_fake
def _(h, f, w_branch, w_next, numbers, norm):
    r1 = h.new_empty((rows.count(h),), dtype=rows.compute_dtype(h, f, w_branch, w_next))
    n = f.new_empty(f.shape if norm else (0,))
    return h.new_empty(h.shape), n, r1, torch.empty_like(r1) if norm else r1.new_empty(0)


@torch.library.custom_op("deeploop::branch_sandwich_backward", mutates_args=())
def _backward(
    dh_new: Tensor | None,
    dn: Tensor | None,
    h: Tensor | None,
    f: Tensor,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    r1: Tensor,
    r2: Tensor | None,
    numbers: Tensor,
    h_dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients asked for, in the order h, f, w_branch, w_next."""
    shape, f = f.shape, rows.as_rows(f)
    if dn is None:
        h = r2 = None
    h, dh_new, dn = rows.maybe_rows(h), rows.maybe_rows(dh_new), rows.maybe_rows(dn)
    w_branch, w_next = rows.packed(w_branch), rows.packed(w_next)
    wanted = [*needs[:3], needs[3] and dn is not None]
    args = (dh_new, dn, h, f, w_branch, w_next, r1, r2, numbers[0].item(), h_dtype, wanted)
    fused = rows.uses_triton(f, r1)
    dh, df, *gains = rows.results(f, fused, backward_launch, _backward_torch, *args)
    gains = map(rows.gain_gradient, gains, (w_branch, w_next), needs[2:])
    return rows.found(shape, dh, df) + rows.found(None, *gains)


@_backward.register_fake
def _(dh_new, dn, h, f, w_branch, w_next, r1, r2, numbers, h_dtype, needs):
    dh = f.new_empty(f.shape, dtype=h_dtype)
    like = (dh, f, w_branch, w_next)
    return [x.new_empty(x.shape) for x, need in zip(like, needs, strict=True) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, f, w_branch, w_next, numbers, norm = inputs
    _, n, r1, r2 = output
    ctx.h_dtype = h.dtype
    kept = (h, r2) if norm else (None, None)
    ctx.save_for_backward(kept[0], f, w_branch, w_next, r1, kept[1], numbers)
    ctx.mark_non_differentiable(r1, r2, *(() if norm else (n,)))
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh_new: Tensor | None, dn: Tensor | None, *_: None) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:4])
    if dh_new is None and dn is None:
        return (None,) * 6
    found = iter(_backward(dh_new, dn, *ctx.saved_tensors, ctx.h_dtype, needs))
    return (*(next(found) if need else None for need in needs), None, None)


_forward.register_autograd(_gradients, setup_context=_save)
