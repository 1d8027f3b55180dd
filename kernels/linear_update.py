"""What `looping_update`, `pre_norm` and `inject` run on: a linear residual update and its norm.

Forward, per row of d values, with two memories L and G (either may be missing)
and one gain per column w_next (None for all ones):

    L' = b * L + c * f
    G' = g * G + e * f + q * L'
    h' = a * h + u * L' + v * G'
    n  = h' * r * w_next          r = 1 / sqrt(mean(h'^2) + eps)

Backward, from dh', dL', dG', dn (each may be missing), with y = h' * r:

    m  = mean(dn * w_next * y)
    T  = dh' + r * (dn * w_next - y * m)             all that reaches h'
    SG = dG' + v * T                                 ... G'
    SL = dL' + u * T + q * SG                        ... L'
    dh = a * T       dL = b * SL       dG = g * SG       df = c * SL + e * SG
    dw_next = sum over rows of dn * y

The map before the norm is linear, so nothing is saved but h' and r, and without
a norm nothing at all. L' and G' enter h' unrounded.

Shapes: h, f, L, G [..., d]; w_next [d]. Dtypes: h' as h, n as f, L' and G' as
asked, each gradient as its tensor; arithmetic float32 (float64 if any input is).
The eight coefficients and eps are data: no new value recompiles anything.

A launch reads each input it is given once and writes each output it is asked for
once, beside O(rows) statistics and O(d) gains; the ops count their passes. The
gain's gradient is added up as in post_sandwich: float32 partial sums, no atomics.
Up to d = 2048 the backward holds the row in registers; wider rows are read in
chunks, and h' and dn a second time, out of L1 or L2. Above 8192 two programs share
a row with memories. Speed on a GPU: not yet measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import rows
from .triton.linear_update import Coefficients, backward_launch, forward_launch


def linear_update(
    h: Tensor,
    f: Tensor,
    local: Tensor | None,
    glob: Tensor | None,
    w_next: Tensor | None,
    coefficients: Coefficients,
    eps: float,
    norm: bool,
    *,
    local_dtype: torch.dtype | None = None,
    glob_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """h', L', G', n; L' and G' are written where a dtype is given for them."""
    numbers = rows.numbers(*coefficients, eps)
    h_new, local_new, glob_new, n, _ = _forward(
        h, f, local, glob, w_next, numbers, local_dtype, glob_dtype, norm
    )
    return h_new, local_new, glob_new, n if norm else None


# ---------------------------------------------------------------------------
# PyTorch closed form: the CPU path


def _combine(dtype: torch.dtype, *terms: tuple[float, Tensor | None]) -> Tensor | None:
    """The sum of factor * tensor; None where every term is missing or 0.

    A new tensor, but for a single one with factor 1: that is handed back as it came.
    """
    total: Tensor | None = None
    owned = False
    for factor, x in terms:
        if x is None or factor == 0:
            continue
        if total is None:
            total, owned = (x.to(dtype), False) if factor == 1 else (x.to(dtype) * factor, True)
        elif owned:
            total.add_(x, alpha=factor)
        else:
            total, owned = torch.add(total, x, alpha=factor), True
    return total


def _written(
    found: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype | None],
    given: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """What was found in the dtypes asked for (None: not asked for), zeros for what is missing.

    Shares no memory with what was given, nor one result with another.
    """
    like = next(x for x in given if x is not None)
    out: list[Tensor | None] = []
    for x, dtype in zip(found, dtypes, strict=True):
        if dtype is None:
            out.append(None)
        elif x is None:
            out.append(torch.zeros_like(like, dtype=dtype))
        else:
            out.append(x.to(dtype, copy=any(x is other for other in (*given, *out))))
    return out


def _forward_torch(
    h: Tensor,
    f: Tensor,
    local: Tensor | None,
    glob: Tensor | None,
    w_next: Tensor | None,
    k: Coefficients,
    eps: float,
    local_dtype: torch.dtype | None,
    glob_dtype: torch.dtype | None,
    norm: bool,
) -> tuple[Tensor | None, ...]:
    dtype = rows.compute_dtype(h, f, local, glob, w_next)
    local_new = glob_new = None
    plain = glob_dtype is None and k.e == k.q == 0
    if plain and local_dtype is None:  # nothing but h' is written
        terms = ((k.a, h), (k.u * k.c, f), (k.u * k.b, local), (k.v * k.g, glob))
        h_new = _combine(dtype, *terms)
    elif plain:
        local_new = _combine(dtype, (k.c, f), (k.b, local))
        h_new = _combine(dtype, (k.a, h), (k.u, local_new), (k.v * k.g, glob))
    else:
        local_new = _combine(dtype, (k.c, f), (k.b, local))
        glob_new = _combine(dtype, (k.e, f), (k.q, local_new), (k.g, glob))
        h_new = _combine(dtype, (k.a, h), (k.u, local_new), (k.v, glob_new))
    h_new = torch.zeros_like(h, dtype=dtype) if h_new is None else h_new
    n = r = None
    if norm:
        r = rows.rstd(h_new, eps)
        n = h_new * r
        n = (n if w_next is None else n.mul_(w_next)).to(f.dtype)
        r = r.view(-1)
    dtypes = (h.dtype, local_dtype, glob_dtype)
    return *_written((h_new, local_new, glob_new), dtypes, (h, f, local, glob)), n, r


def _backward_torch(
    gradients: tuple[Tensor | None, ...],
    h_new: Tensor | None,
    w_next: Tensor | None,
    r: Tensor | None,
    k: Coefficients,
    has_glob: bool,
    dtypes: tuple[torch.dtype | None, ...],
    need_next: bool,
) -> list[Tensor | None]:
    """dh, df, dL, dG and dw_next."""
    total, dlocal_new, dglob_new, dn = gradients
    wide = torch.float64 in dtypes
    dtype = torch.float64 if wide else rows.compute_dtype(*gradients, w_next, r)
    dw_next = None
    if dn is not None:
        assert h_new is not None and r is not None
        x, dn, r = h_new.to(dtype), dn.to(dtype), r[:, None]
        product = dn * x
        if need_next and w_next is not None:
            dw_next = rows.column_sum(product, r, w_next.dtype)
        mean = rows.row_sum(product, w_next) * (r / x.shape[-1])
        normed = dn * r if w_next is None else torch.mul(dn, w_next, out=product).mul_(r)
        normed.addcmul_(x, mean * (r * r), value=-1)
        total = normed if total is None else normed.add_(total)
    dglob = _combine(dtype, (1.0, dglob_new), (k.v, total)) if has_glob else None
    dlocal = _combine(dtype, (1.0, dlocal_new), (k.u, total), (k.q, dglob))
    found = (
        _combine(dtype, (k.a, total)),
        _combine(dtype, (k.c, dlocal), (k.e, dglob)),
        _combine(dtype, (k.b, dlocal)),
        _combine(dtype, (k.g, dglob)),
    )
    return [*_written(found, dtypes, gradients), dw_next]


# ---------------------------------------------------------------------------
# The op


@torch.library.custom_op("deeploop::linear_update", mutates_args=())
def _forward(
    h: Tensor,
    f: Tensor,
    local: Tensor | None,
    glob: Tensor | None,
    w_next: Tensor | None,
    numbers: Tensor,
    local_dtype: torch.dtype | None,
    glob_dtype: torch.dtype | None,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> h', L', G', n, r (the last one [rows], for the backward); empty where not asked for."""
    *letters, eps = numbers.tolist()
    shape = h.shape
    inputs = (rows.as_rows(h), rows.as_rows(f), rows.maybe_rows(local), rows.maybe_rows(glob))
    w_next = rows.packed(w_next)
    args = (*inputs, w_next, Coefficients(*letters), eps, local_dtype, glob_dtype, norm)
    fused = rows.uses_triton(h, *inputs, w_next)
    *full, r = rows.results(h, fused, forward_launch, _forward_torch, *args)
    h_new, local_new, glob_new, n = (_empty(h) if x is None else x.view(shape) for x in full)
    return h_new, local_new, glob_new, n, _empty(h) if r is None else r


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(0)


@_forward.register_fake
def _(h, f, local, glob, w_next, numbers, local_dtype, glob_dtype, norm):
    local_new, glob_new = (
        _empty(h) if t is None else h.new_empty(h.shape, dtype=t) for t in (local_dtype, glob_dtype)
    )
    dtype = rows.compute_dtype(h, f, local, glob, w_next)
    r = h.new_empty((rows.count(h),), dtype=dtype) if norm else _empty(h)
    n = f.new_empty(f.shape) if norm else _empty(h)
    return h.new_empty(h.shape), local_new, glob_new, n, r


@torch.library.custom_op("deeploop::linear_update_backward", mutates_args=())
def _backward(
    dh_new: Tensor | None,
    dlocal_new: Tensor | None,
    dglob_new: Tensor | None,
    dn: Tensor | None,
    h_new: Tensor | None,
    w_next: Tensor | None,
    r: Tensor | None,
    numbers: Tensor,
    has_glob: bool,
    dh_dtype: torch.dtype | None,
    df_dtype: torch.dtype | None,
    dlocal_dtype: torch.dtype | None,
    dglob_dtype: torch.dtype | None,
    need_next: bool,
) -> list[Tensor]:
    """The gradients a dtype is given for, in the order h, f, L, G, then that of w_next."""
    k = Coefficients(*numbers.tolist()[:-1])
    given = (dh_new, dlocal_new, dglob_new, dn)
    like = next(x for x in given if x is not None)
    gradients = tuple(rows.maybe_rows(x) for x in given)
    if dn is None:
        h_new = r = None
    h_new, w_next = rows.maybe_rows(h_new), rows.packed(w_next)
    dtypes = (dh_dtype, df_dtype, dlocal_dtype, dglob_dtype)
    args = (gradients, h_new, w_next, r, k, has_glob, dtypes, need_next and dn is not None)
    fused = rows.uses_triton(like, *gradients, w_next, r) and torch.float64 not in dtypes
    *found, dw_next = rows.results(like, fused, backward_launch, _backward_torch, *args)
    dw_next = rows.gain_gradient(dw_next, w_next, need_next)
    return rows.found(like.shape, *found) + rows.found(None, dw_next)


@_backward.register_fake
def _(
    dh_new, dlocal_new, dglob_new, dn, h_new, w_next, r, numbers, has_glob,
    dh_dtype, df_dtype, dlocal_dtype, dglob_dtype, need_next,
):  # fmt: skip
    like = next(x for x in (dh_new, dlocal_new, dglob_new, dn) if x is not None)
    dtypes = (dh_dtype, df_dtype, dlocal_dtype, dglob_dtype)
    found = [like.new_empty(like.shape, dtype=t) for t in dtypes if t is not None]
    return found + ([w_next.new_empty(w_next.shape)] if need_next else [])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, f, local, glob, w_next, numbers, local_dtype, glob_dtype, norm = inputs
    h_new, local_new, glob_new, n, r = output
    ctx.dtypes = [None if x is None else x.dtype for x in (h, f, local, glob)]
    ctx.has_glob = glob is not None or glob_dtype is not None
    ctx.save_for_backward(*((h_new, w_next, r) if norm else (None, None, None)), numbers)
    asked = ((local_new, local_dtype), (glob_new, glob_dtype), (n, norm or None))
    ctx.mark_non_differentiable(r, *(x for x, asked_for in asked if asked_for is None))
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    given = gradients[:4]
    if all(x is None for x in given):
        return (None,) * 9
    needs = ctx.needs_input_grad[:5]
    dtypes = [t if need else None for t, need in zip(ctx.dtypes, needs[:4], strict=True)]
    found = iter(_backward(*given, *ctx.saved_tensors, ctx.has_glob, *dtypes, needs[4]))
    return (*(next(found) if need else None for need in needs), *(None,) * 4)


_forward.register_autograd(_gradients, setup_context=_save)
