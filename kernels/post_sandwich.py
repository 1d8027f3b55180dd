"""post_sandwich: scaled residual add, norm, and the next visit's norm in one pass.

Forward, per row of d values (RMS over the row, w_* one gain per column or None):

    z  = alpha * h + f
    h' = z * r1 * w_out           r1 = 1 / sqrt(mean(z^2)  + eps)
    n  = h' * r2 * w_next         r2 = 1 / sqrt(mean(h'^2) + eps)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rows


def post_sandwich(
    h: Tensor,
    f: Tensor,
    w_out: Tensor | None,
    w_next: Tensor | None,
    alpha: float,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """h' = RMSNorm(alpha * h + f) * w_out ; n = RMSNorm(h') * w_next."""
    rows.check_rows("post_sandwich", h=h, f=f)
    rows.check_gains("post_sandwich", h, w_out=w_out, w_next=w_next)
    h_new, n, _, _ = _forward(h, f, w_out, w_next, alpha, eps)
    return h_new, n


# ---------------------------------------------------------------------------
# PyTorch closed form: the CPU path


def _forward_torch(
    h: Tensor, f: Tensor, w_out: Tensor | None, w_next: Tensor | None, alpha: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = rows.compute_dtype(h, f, w_out, w_next)
    z = torch.add(f.to(dtype), h.to(dtype), alpha=alpha)
    zw = z if w_out is None else z * w_out
    r1 = rows.rstd(z, eps)
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
) -> list[Tensor]:
    dtype, d = rows.compute_dtype(h, f, w_out, w_next), h.shape[-1]
    need_h, need_f, need_out, need_next = needs
    z = torch.add(rows.as_rows(f).to(dtype), rows.as_rows(h).to(dtype), alpha=alpha)
    zw = z if w_out is None else z * w_out
    r1, r2 = r1[:, None], r2[:, None]
    mean_1 = torch.zeros_like(r1)
    dw_next = None
    if dn is not None:
        dn = rows.as_rows(dn).to(dtype)
        product = dn * zw
        mean_2 = rows.row_sum(product, w_next) * (r1 * r2 / d)
        if need_next:
            dw_next = rows.column_sum(product, r1 * r2, w_next.dtype)
        mean_1 = mean_2 * (eps * r2 * r2)
        total = dn * r2 if w_next is None else torch.mul(dn, w_next, out=product).mul_(r2)
        total.addcmul_(zw, mean_2 * (r1 * r2 * r2), value=-1)
    if dh_new is not None:
        dh_new = rows.as_rows(dh_new).to(dtype)
        mean_1 = torch.addcmul(mean_1, (dh_new * zw).sum(-1, keepdim=True), r1 / d)
        total = dh_new if dn is None else total.add_(dh_new)
    dw_out = rows.column_sum(total * z, r1, w_out.dtype) if need_out else None
    dh = df = None
    if need_h or need_f:
        dz = total * r1 if w_out is None else (total * w_out).mul_(r1)
        dz.addcmul_(z, mean_1 * (r1 * r1), value=-1)
        dh = (dz * alpha).to(h.dtype).view(h.shape) if need_h else None
        df = dz.to(f.dtype).view(f.shape) if need_f else None
    if need_next and dw_next is None:
        dw_next = torch.zeros_like(w_next)
    return [g for g in (dh, df, dw_out, dw_next) if g is not None]


# ---------------------------------------------------------------------------
# The op


@torch.library.custom_op("deeploop::post_sandwich", mutates_args=())
def _forward(
    h: Tensor, f: Tensor, w_out: Tensor | None, w_next: Tensor | None, alpha: float, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> h', n, r1, r2 (the last two [rows], for the backward)."""
    rows.check_numbers("post_sandwich", eps, alpha=alpha)
    with rows.no_autocast(h):
        shape = h.shape
        h_new, n, r1, r2 = _forward_torch(
            rows.as_rows(h), rows.as_rows(f), w_out, w_next, alpha, eps
        )
        return h_new.view(shape), n.view(shape), r1, r2


@_forward.register_fake
def _(h, f, w_out, w_next, alpha, eps):  # type: ignore[no-untyped-def]
    stats = h.new_empty((rows.count(h),), dtype=rows.compute_dtype(h, f, w_out, w_next))
    return h.new_empty(h.shape), f.new_empty(f.shape), stats, torch.empty_like(stats)


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
    alpha: float,
    eps: float,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients asked for, in the order h, f, w_out, w_next."""
    with rows.no_autocast(h):
        return _backward_torch(dh_new, dn, h, f, w_out, w_next, r1, r2, alpha, eps, needs)


@_backward.register_fake
def _(dh_new, dn, h, f, w_out, w_next, r1, r2, alpha, eps, needs):  # type: ignore[no-untyped-def]
    inputs = (h, f, w_out, w_next)
    return [x.new_empty(x.shape) for x, need in zip(inputs, needs, strict=True) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, f, w_out, w_next, ctx.alpha, ctx.eps = inputs
    _, _, r1, r2 = output
    ctx.save_for_backward(h, f, w_out, w_next, r1, r2)
    ctx.mark_non_differentiable(r1, r2)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh_new: Tensor | None, dn: Tensor | None, *_: None) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:4])
    if dh_new is None and dn is None:
        return (None,) * 6
    found = iter(_backward(dh_new, dn, *ctx.saved_tensors, ctx.alpha, ctx.eps, needs))
    return (*(next(found) if need else None for need in needs), None, None)


_forward.register_autograd(_gradients, setup_context=_save)
