"""pre_norm: residual add and the next visit's norm in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rows


def pre_norm(
    h: Tensor, f: Tensor, w_next: Tensor | None, scale: float = 1.0, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """h' = h + scale * f ; n = RMSNorm(h') * w_next."""
    rows.check_rows("pre_norm", h=h, f=f)
    rows.check_gains("pre_norm", h, w_next=w_next)
    h_new, n, _ = _forward(h, f, w_next, scale, eps)
    return h_new, n


# ---------------------------------------------------------------------------
# PyTorch closed form: the CPU path


def _forward_torch(
    h: Tensor, f: Tensor, w_next: Tensor | None, scale: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = rows.compute_dtype(h, f, w_next)
    h_new = torch.add(h.to(dtype), f.to(dtype), alpha=scale)
    r = rows.rstd(h_new, eps)
    n = h_new * r
    if w_next is not None:
        n.mul_(w_next)
    return h_new.to(h.dtype), n.to(f.dtype), r.view(-1)


def _backward_torch(
    dh_new: Tensor | None,
    dn: Tensor | None,
    h_new: Tensor,
    w_next: Tensor | None,
    r: Tensor,
    scale: float,
    f_dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    need_h, need_f, need_next = needs
    dtype, shape, d = r.dtype, h_new.shape, h_new.shape[-1]
    total = None if dh_new is None else rows.as_rows(dh_new).to(dtype)
    dw_next = torch.zeros_like(w_next) if need_next else None
    if dn is not None:
        x, dn, r = rows.as_rows(h_new).to(dtype), rows.as_rows(dn).to(dtype), r[:, None]
        product = dn * x
        if need_next:
            dw_next = rows.column_sum(product, r, w_next.dtype)
        if need_h or need_f:
            mean = rows.row_sum(product, w_next).mul_(r / d)
            normed = dn * r if w_next is None else torch.mul(dn, w_next, out=product).mul_(r)
            normed.addcmul_(x, mean * (r * r), value=-1)
            total = normed if total is None else normed.add_(total)
    dh = df = None
    if need_f:
        df = (total * scale).to(f_dtype).view(shape)
    if need_h:
        # A gradient is never handed on as it came in: outputs do not alias inputs.
        dh = total.to(h_new.dtype, copy=dn is None).view(shape)
    return [g for g in (dh, df, dw_next) if g is not None]


# ---------------------------------------------------------------------------
# The op


@torch.library.custom_op("deeploop::pre_norm", mutates_args=())
def _forward(
    h: Tensor, f: Tensor, w_next: Tensor | None, scale: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> h', n, r (the last one [rows], for the backward)."""
    rows.check_numbers("pre_norm", eps, scale=scale)
    with rows.no_autocast(h):
        shape = h.shape
        h_new, n, r = _forward_torch(rows.as_rows(h), rows.as_rows(f), w_next, scale, eps)
        return h_new.view(shape), n.view(shape), r


@_forward.register_fake
def _(h, f, w_next, scale, eps):  # type: ignore[no-untyped-def]
    stats = h.new_empty((rows.count(h),), dtype=rows.compute_dtype(h, f, w_next))
    return h.new_empty(h.shape), f.new_empty(f.shape), stats


@torch.library.custom_op("deeploop::pre_norm_backward", mutates_args=())
def _backward(
    dh_new: Tensor | None,
    dn: Tensor | None,
    h_new: Tensor,
    w_next: Tensor | None,
    r: Tensor,
    scale: float,
    f_dtype: torch.dtype,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients asked for, in the order h, f, w_next."""
    with rows.no_autocast(h_new):
        return _backward_torch(dh_new, dn, h_new, w_next, r, scale, f_dtype, needs)


@_backward.register_fake
def _(dh_new, dn, h_new, w_next, r, scale, f_dtype, needs):  # type: ignore[no-untyped-def]
    need_h, need_f, need_next = needs
    dh = h_new.new_empty(h_new.shape) if need_h else None
    df = h_new.new_empty(h_new.shape, dtype=f_dtype) if need_f else None
    dw_next = w_next.new_empty(w_next.shape) if need_next else None
    return [g for g in (dh, df, dw_next) if g is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, f, w_next, ctx.scale, _ = inputs
    h_new, _, r = output
    ctx.f_dtype = f.dtype
    ctx.save_for_backward(h_new, w_next, r)
    ctx.mark_non_differentiable(r)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dh_new: Tensor | None, dn: Tensor | None, *_: None) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    if dh_new is None and dn is None:
        return (None,) * 5
    found = iter(_backward(dh_new, dn, *ctx.saved_tensors, ctx.scale, ctx.f_dtype, needs))
    return (*(next(found) if need else None for need in needs), None, None)


_forward.register_autograd(_gradients, setup_context=_save)
