"""linear_update: a linear residual update and its norm, shared by three ops.

`pre_norm`, `inject` and `looping_update` are this op with different coefficients.

Forward, per row of d values, with two memories L and G (either may be None)
and one gain per column w_next (None for all ones):

    L' = b * L + c * f
    G' = g * G + e * f + q * L'
    h' = a * h + u * L' + v * G'
    n  = h' * r * w_next          r = 1 / sqrt(mean(h'^2) + eps)

Backward, from dh', dL', dG', dn (each may be None), with y = h' * r:

    m  = mean(dn * w_next * y)
    T  = dh' + r * (dn * w_next - y * m)             total gradient of h'
    SG = dG' + v * T                                 total gradient of G'
    SL = dL' + u * T + q * SG                        total gradient of L'
    dh = a * T       dL = b * SL       dG = g * SG       df = c * SL + e * SG
    dw_next = sum over rows of dn * y

The map before the norm is linear, so only h', w_next and r are saved, and without a
norm nothing. h' is computed from the unrounded L' and G'.

Shapes: h, f, L, G [..., d]; w_next [d]. Dtypes: h' as h, n as f, L' and G' as
requested, each gradient as its tensor; arithmetic in float32 (float64 if any input
is). The eight coefficients and eps are data: no value compiles the kernel again.

A launch reads each given input once and writes each requested output once, plus
O(rows) statistics and O(d) gains; each op's docstring counts its passes. The gradient
of the gain is accumulated as in post_sandwich: float32 partial sums, no atomics. Up
to d = 2048 the backward keeps the row in registers; wider rows are read in chunks,
and h' and dn a second time, from L1 or L2. Above d = 8192 two programs share a row
if there are memories. Speed on a GPU: not yet measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _aten
from ._launch import uses_triton
from ._op import Saved, as_data, define, run
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
    """Update the stream and its memories by the formulas above; inputs are not checked.

    Args:
        h, f, local, glob: stream, branch and memories L and G, each [..., d]; a memory
            may be None.
        w_next: gain of the norm, [d], or None for ones.
        coefficients: the letters of the formulas.
        eps: added to the mean square under the root.
        norm: False leaves the norm out.
        local_dtype, glob_dtype: dtype of L' and G'; a memory is written only if given one.

    Returns:
        h', L', G' and n (None if norm is False); an empty tensor for a memory not written.
    """
    numbers = as_data(*coefficients, eps)
    h_new, local_new, glob_new, n, _ = _forward(
        h, f, local, glob, w_next, numbers, local_dtype, glob_dtype, norm
    )
    return h_new, local_new, glob_new, n if norm else None


# ---------------------------------------------------------------------------
# PyTorch closed form: the CPU path


def _combine(dtype: torch.dtype, *terms: tuple[float, Tensor | None]) -> Tensor | None:
    """Sum factor * tensor over the terms; None if every tensor is None or every factor 0.

    The result is a new tensor, except for a single term with factor 1 in the right
    dtype, which is returned itself.
    """
    total: Tensor | None = None
    is_new = False
    for factor, x in terms:
        if x is None or factor == 0:
            continue
        if total is None:
            total, is_new = (x.to(dtype), False) if factor == 1 else (x.to(dtype) * factor, True)
        elif is_new:
            total.add_(x, alpha=factor)
        else:
            total, is_new = torch.add(total, x, alpha=factor), True
    return total


def _written(
    results: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype | None],
    given: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Cast each result to its dtype; a dtype of None drops it, a result of None becomes zeros.

    The outputs share no memory with the tensors in `given` nor with one another.
    """
    like = next(x for x in given if x is not None)
    out: list[Tensor | None] = []
    for x, dtype in zip(results, dtypes, strict=True):
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
    dtype = _aten.compute_dtype(h, f, local, glob, w_next)
    local_new = glob_new = None
    plain = glob_dtype is None and k.e == k.q == 0
    if plain and local_dtype is None:  # only h' is written
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
        r = _aten.rstd(h_new, eps)
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
    """Compute dh, df, dL, dG and dw_next."""
    total, dlocal_new, dglob_new, dn = gradients
    wide = torch.float64 in dtypes
    dtype = torch.float64 if wide else _aten.compute_dtype(*gradients, w_next, r)
    dw_next = None
    if dn is not None:
        assert h_new is not None and r is not None
        x, dn, r = h_new.to(dtype), dn.to(dtype), r[:, None]
        product = dn * x
        if need_next and w_next is not None:
            dw_next = _aten.column_sum(product, r, w_next.dtype)
        mean = _aten.row_sum(product, w_next) * (r / x.shape[-1])
        normed = dn * r if w_next is None else torch.mul(dn, w_next, out=product).mul_(r)
        normed.addcmul_(x, mean * (r * r), value=-1)
        total = normed if total is None else normed.add_(total)
    dglob = _combine(dtype, (1.0, dglob_new), (k.v, total)) if has_glob else None
    dlocal = _combine(dtype, (1.0, dlocal_new), (k.u, total), (k.q, dglob))
    results = (
        _combine(dtype, (k.a, total)),
        _combine(dtype, (k.c, dlocal), (k.e, dglob)),
        _combine(dtype, (k.b, dlocal)),
        _combine(dtype, (k.g, dglob)),
    )
    return [*_written(results, dtypes, gradients), dw_next]


# ---------------------------------------------------------------------------
# The op


def _run_forward(h, f, local, glob, w_next, numbers, local_dtype, glob_dtype, norm):
    """Compute h', L', G', n, r ([rows]); None for one not requested."""
    *letters, eps = numbers.tolist()
    tensors = (*_aten.as_rows(h, f, local, glob), *_aten.packed(w_next))
    args = (*tensors, Coefficients(*letters), eps, local_dtype, glob_dtype, norm)
    *full, r = run(uses_triton(*tensors), h, forward_launch, _forward_torch, *args)
    return *_aten.view_as(h.shape, *full), r


def _run_backward(
    dh_new, dlocal_new, dglob_new, dn, h_new, w_next, r, numbers, has_glob,
    dh_dtype, df_dtype, dlocal_dtype, dglob_dtype, need_next,
):  # fmt: skip
    k = Coefficients(*numbers.tolist()[:-1])
    given = (dh_new, dlocal_new, dglob_new, dn)
    like = next(x for x in given if x is not None)
    gradients = tuple(_aten.as_rows(*given))
    if dn is None:
        h_new = r = None
    h_new, w_next = *_aten.as_rows(h_new), *_aten.packed(w_next)
    dtypes = (dh_dtype, df_dtype, dlocal_dtype, dglob_dtype)
    args = (gradients, h_new, w_next, r, k, has_glob, dtypes, need_next and dn is not None)
    fused = uses_triton(like, *gradients, w_next, r) and torch.float64 not in dtypes
    *full, dw_next = run(fused, like, backward_launch, _backward_torch, *args)
    return *_aten.view_as(like.shape, *full), _aten.gain_gradient(dw_next, w_next, need_next)


def _fake(h, f, local, glob, w_next, numbers, local_dtype, glob_dtype, norm):
    dtypes = (h.dtype, local_dtype, glob_dtype, f.dtype if norm else None)
    r = None
    if norm:
        dtype = _aten.compute_dtype(h, f, local, glob, w_next)
        r = h.new_empty((_aten.count(h),), dtype=dtype)
    return *_fakes(h, dtypes), r


def _fake_backward(
    dh_new, dlocal_new, dglob_new, dn, h_new, w_next, r, numbers, has_glob,
    dh_dtype, df_dtype, dlocal_dtype, dglob_dtype, need_next,
):  # fmt: skip
    like = next(x for x in (dh_new, dlocal_new, dglob_new, dn) if x is not None)
    dw_next = w_next.new_empty(w_next.shape) if need_next else None
    return *_fakes(like, (dh_dtype, df_dtype, dlocal_dtype, dglob_dtype)), dw_next


def _fakes(like: Tensor, dtypes: Sequence[torch.dtype | None]) -> list[Tensor | None]:
    return [None if t is None else like.new_empty(like.shape, dtype=t) for t in dtypes]


def _save(inputs, output):
    h, f, local, glob, w_next, numbers, _, glob_dtype, norm = inputs
    dtypes = [None if x is None else x.dtype for x in (h, f, local, glob)]
    has_glob = glob is not None or glob_dtype is not None
    saved = (output[0], w_next, output[4]) if norm else (None, None, None)
    return Saved((*saved, numbers), (has_glob, dtypes))


def _ask(options, needs):
    """Ask for the gradients of h, f, L and G by their dtypes, for that of w_next by a bool."""
    has_glob, dtypes = options
    return has_glob, *(t if n else None for t, n in zip(dtypes, needs[:4], strict=True)), needs[4]


_forward, _backward = define(
    "linear_update",
    arguments="Tensor h, Tensor f, Tensor? local, Tensor? glob, Tensor? w_next, Tensor numbers, "
    "ScalarType? local_dtype, ScalarType? glob_dtype, bool norm",
    results=("h_new", "local_new", "glob_new", "n", "r"),
    gradients_from=("h_new", "local_new", "glob_new", "n"),
    gradients_for=("h", "f", "local", "glob", "w_next"),
    forward=_run_forward,
    fake=_fake,
    save=_save,
    backward_arguments="Tensor? dh_new, Tensor? dlocal_new, Tensor? dglob_new, Tensor? dn, "
    "Tensor? h_new, Tensor? w_next, Tensor? r, Tensor numbers, bool has_glob, "
    "ScalarType? dh_dtype, ScalarType? df_dtype, ScalarType? dlocal_dtype, "
    "ScalarType? dglob_dtype, bool need_next",
    backward=_run_backward,
    backward_fake=_fake_backward,
    ask=_ask,
)
