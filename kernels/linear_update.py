"""What `looping_update` and `inject` run on: a linear residual update and its norm.

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
The eight coefficients are data: no new value recompiles anything.

A launch reads each input it is given once and writes each output it is asked for
once, beside O(rows) statistics and O(d) gains; the ops count their passes. The
gain's gradient is added up as in post_sandwich: float32 partial sums, no atomics.
Up to d = 2048 the backward holds the row in registers; wider rows are read in
chunks, and h' and dn a second time, out of L1 or L2. Speed on a GPU: not yet
measured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rows
from .rows import Launch, jit, load, load_or_zero, rsqrt_mean, store, tile, tl


class Coefficients(NamedTuple):
    """The letters of the formulas above."""

    a: float = 1.0  # h in h'
    b: float = 0.0  # L in L'
    c: float = 1.0  # f in L'
    g: float = 0.0  # G in G'
    e: float = 0.0  # f in G'
    q: float = 0.0  # L' in G'
    u: float = 1.0  # L' in h'
    v: float = 0.0  # G' in h'


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
    numbers = rows.numbers(*coefficients)
    h_new, local_new, glob_new, n, _ = _forward(
        h, f, local, glob, w_next, numbers, eps, local_dtype, glob_dtype, norm
    )
    return h_new, local_new, glob_new, n if norm else None


# ---------------------------------------------------------------------------
# Triton kernels


@jit(do_not_specialize=["n_rows", "a", "b", "c", "g", "e", "q", "u", "v", "eps"])
def _forward_kernel(
    h_ptr, f_ptr, local_ptr, glob_ptr, w_next_ptr, h_new_ptr, local_new_ptr, glob_new_ptr,
    n_ptr, r_ptr, n_rows, a, b, c, g, e, q, u, v, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers. EARLY stores L' before h and G are read, not after.

    That is one more wait for memory and a whole row less alive at once.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    o, o_gain, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
    base = first * D
    b_f = load(f_ptr + base, o, m)
    b_local = b_f * c
    if local_ptr is not None:
        b_local += load(local_ptr + base, o, m) * b
    if EARLY and local_new_ptr is not None:
        store(local_new_ptr + base, o, b_local, m)
    b_h = load(h_ptr + base, o, m) * a + b_local * u
    if glob_ptr is not None or glob_new_ptr is not None:
        b_glob = b_f * e + b_local * q
        if glob_ptr is not None:
            b_glob += load(glob_ptr + base, o, m) * g
        b_h += b_glob * v
        if glob_new_ptr is not None:
            store(glob_new_ptr + base, o, b_glob, m)
    if local_new_ptr is not None and not EARLY:
        store(local_new_ptr + base, o, b_local, m)
    store(h_new_ptr + base, o, b_h, m)
    if n_ptr is not None:
        b_r = rsqrt_mean(b_h, D, eps)
        b_n = b_h * b_r[:, None]
        if w_next_ptr is not None:
            b_n *= load(w_next_ptr, o_gain, m)
        store(n_ptr + base, o, b_n, m)
        tl.store(r_ptr + first + o_row, b_r, mask=m_row)


@jit()
def _read_norm(dn_ptr, h_new_ptr, w_next_ptr, base, o, o_gain, m):
    """h', dn and dn * w_next of one tile."""
    b_h = load(h_new_ptr + base, o, m)
    b_dn = load(dn_ptr + base, o, m)
    b_dnw = b_dn
    if w_next_ptr is not None:
        b_dnw = b_dn * load(w_next_ptr, o_gain, m)
    return b_h, b_dn, b_dnw


@jit()
def _read_rest(dh_new_ptr, dlocal_new_ptr, dglob_new_ptr, base, o, m):
    """dh', dL' and dG' of one tile; what is missing is zero."""
    b_dh = load_or_zero(dh_new_ptr, base, o, m)
    b_dlocal = load_or_zero(dlocal_new_ptr, base, o, m)
    b_dglob = load_or_zero(dglob_new_ptr, base, o, m)
    return b_dh, b_dlocal, b_dglob


@jit()
def _write(
    dh_ptr, df_ptr, dlocal_ptr, dglob_ptr, base, o, m, a, b, c, g, e, q, u, v,
    b_total, b_dlocal, b_dglob, GLOBAL: tl.constexpr,
):  # fmt: skip
    """Store the gradients of one tile from T, dL' and dG'."""
    if dh_ptr is not None:
        store(dh_ptr + base, o, b_total * a, m)
    b_dlocal += b_total * u
    b_df = b_dlocal * c
    if GLOBAL:
        b_dglob += b_total * v
        b_dlocal += b_dglob * q
        b_df = b_dlocal * c + b_dglob * e
        if dglob_ptr is not None:
            store(dglob_ptr + base, o, b_dglob * g, m)
    if dlocal_ptr is not None:
        store(dlocal_ptr + base, o, b_dlocal * b, m)
    if df_ptr is not None:
        store(df_ptr + base, o, b_df, m)


@jit(do_not_specialize=["n_rows", "a", "b", "c", "g", "e", "q", "u", "v"])
def _backward_kernel(
    dh_new_ptr, dlocal_new_ptr, dglob_new_ptr, dn_ptr, h_new_ptr, w_next_ptr, r_ptr, dh_ptr,
    df_ptr, dlocal_ptr, dglob_ptr, dw_next_ptr, n_rows, a, b, c, g, e, q, u, v,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GLOBAL: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers, read once."""
    b_dw_next = tl.zeros((ROWS, BLOCK), tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(n_rows, ROWS), tl.num_programs(0)):
        first = tl.cast(block, tl.int64) * ROWS
        o, o_gain, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
        base = first * D
        b_total, b_dlocal, b_dglob = _read_rest(
            dh_new_ptr, dlocal_new_ptr, dglob_new_ptr, base, o, m
        )
        if dn_ptr is not None:
            b_r = load(r_ptr + first, o_row, m_row)[:, None]
            b_h, b_dn, b_dnw = _read_norm(dn_ptr, h_new_ptr, w_next_ptr, base, o, o_gain, m)
            b_mean = tl.sum(b_dnw * b_h, axis=1)[:, None] * b_r / D
            b_y = b_h * b_r
            b_total += b_r * (b_dnw - b_y * b_mean)
            b_dw_next += b_dn * b_y
        _write(
            dh_ptr, df_ptr, dlocal_ptr, dglob_ptr, base, o, m, a, b, c, g, e, q, u, v,
            b_total, b_dlocal, b_dglob, GLOBAL,
        )  # fmt: skip
    if dw_next_ptr is not None:
        o_col = tl.arange(0, BLOCK)
        o = tl.program_id(0) * D + o_col
        tl.store(dw_next_ptr + o, tl.sum(b_dw_next, axis=0), mask=o_col < D)


@jit(do_not_specialize=["n_rows", "n_chunks", "a", "b", "c", "g", "e", "q", "u", "v"])
def _backward_wide_kernel(
    dh_new_ptr, dlocal_new_ptr, dglob_new_ptr, dn_ptr, h_new_ptr, w_next_ptr, r_ptr, dh_ptr,
    df_ptr, dlocal_ptr, dglob_ptr, dw_next_ptr, n_rows, n_chunks, a, b, c, g, e, q, u, v,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, GLOBAL: tl.constexpr,
):  # fmt: skip
    """A row in chunks; h' and dn are read twice, the second time from L1 or L2."""
    o_tile = tl.arange(0, BLOCK)
    b_zero = tl.zeros((BLOCK,), tl.float32)
    b_dw_next = (b_zero,) * CHUNKS
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        base = tl.cast(row, tl.int64) * D
        if dn_ptr is not None:
            b_r = tl.load(r_ptr + row)
            b_sum = b_zero
            # As in post_sandwich: two chunks in flight, a bound known at run time only.
            for pair in range(0, n_chunks, 2):
                for half in tl.static_range(2):
                    o = (pair + half) * BLOCK + o_tile
                    b_h, b_dn, b_dnw = _read_norm(
                        dn_ptr, h_new_ptr, w_next_ptr, base, o, o, o < D
                    )
                    b_sum += b_dnw * b_h
            b_mean = tl.sum(b_sum) * b_r / D
        b_next = b_dw_next[:0]
        for chunk in tl.static_range(CHUNKS):
            o = chunk * BLOCK + o_tile
            b_total, b_dlocal, b_dglob = _read_rest(
                dh_new_ptr, dlocal_new_ptr, dglob_new_ptr, base, o, o < D
            )
            b_dw = b_zero
            if dn_ptr is not None:
                b_h, b_dn, b_dnw = _read_norm(dn_ptr, h_new_ptr, w_next_ptr, base, o, o, o < D)
                b_y = b_h * b_r
                b_total += b_r * (b_dnw - b_y * b_mean)
                b_dw = b_dn * b_y
            b_next += (b_dw_next[chunk] + b_dw,)
            _write(
                dh_ptr, df_ptr, dlocal_ptr, dglob_ptr, base, o, o < D, a, b, c, g, e, q, u, v,
                b_total, b_dlocal, b_dglob, GLOBAL,
            )  # fmt: skip
        b_dw_next = b_next
    if dw_next_ptr is not None:
        for chunk in tl.static_range(CHUNKS):
            o_col = chunk * BLOCK + o_tile
            o = tl.program_id(0) * D + o_col
            tl.store(dw_next_ptr + o, b_dw_next[chunk], mask=o_col < D)


# ---------------------------------------------------------------------------
# Launches


class Outputs(NamedTuple):
    """What a forward launch fills in."""

    h: Tensor
    local: Tensor | None
    glob: Tensor | None
    n: Tensor | None
    r: Tensor | None


def _like(x: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    return None if dtype is None else torch.empty_like(x, dtype=dtype)


def forward_launch(
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
) -> tuple[Outputs, Launch]:
    """Outputs still to be filled, and the launch that fills them; inputs are [rows, d]."""
    n_rows, d = h.shape
    config = rows.forward_config(d)
    r = h.new_empty(n_rows, dtype=torch.float32) if norm else None
    n = torch.empty_like(f) if norm else None
    out = Outputs(torch.empty_like(h), _like(h, local_dtype), _like(h, glob_dtype), n, r)
    args = {
        "h_ptr": h, "f_ptr": f, "local_ptr": local, "glob_ptr": glob, "w_next_ptr": w_next,
        "h_new_ptr": out.h, "local_new_ptr": out.local, "glob_new_ptr": out.glob,
        "n_ptr": out.n, "r_ptr": out.r, "n_rows": n_rows, **k._asdict(), "eps": eps,
        "D": d, "BLOCK": config.block, "ROWS": config.rows, "EARLY": config.block > 8192,
    }  # fmt: skip
    return out, Launch(_forward_kernel, -(-n_rows // config.rows), args, config)


def backward_launch(
    gradients: tuple[Tensor | None, ...],
    h_new: Tensor | None,
    w_next: Tensor | None,
    r: Tensor | None,
    k: Coefficients,
    has_glob: bool,
    dtypes: tuple[torch.dtype | None, ...],
    need_next: bool,
) -> tuple[list[Tensor | None], Launch]:
    """dh, df, dL, dG (as dtypes say) and the partial dw_next still to be filled, and their launch.

    gradients are dh', dL', dG', dn.
    """
    dh_new, dlocal_new, dglob_new, dn = gradients
    given = [x for x in gradients if x is not None]
    n_rows, d = given[0].shape
    config = rows.backward_config(d, min(x.element_size() for x in given), gains=1)
    groups = rows.programs(given[0], config)
    dh, df, dlocal, dglob = (_like(given[0], dtype) for dtype in dtypes)
    partial = given[0].new_empty(groups, d, dtype=torch.float32) if need_next else None
    args = {
        "dh_new_ptr": dh_new, "dlocal_new_ptr": dlocal_new, "dglob_new_ptr": dglob_new,
        "dn_ptr": dn, "h_new_ptr": h_new, "w_next_ptr": w_next, "r_ptr": r, "dh_ptr": dh,
        "df_ptr": df, "dlocal_ptr": dlocal, "dglob_ptr": dglob, "dw_next_ptr": partial,
        "n_rows": n_rows, **k._asdict(), "D": d, "BLOCK": config.block, "GLOBAL": has_glob,
    }  # fmt: skip
    if config.chunks == 1:
        kernel, args["ROWS"] = _backward_kernel, config.rows
    else:
        kernel = _backward_wide_kernel
        args |= {"n_chunks": config.chunks, "CHUNKS": config.chunks}
    return [dh, df, dlocal, dglob, partial], Launch(kernel, groups, args, config)


def aot_launches(
    name: str,
    x: Tensor,
    w: Tensor | None,
    local: Tensor | None = None,
    glob: Tensor | None = None,
    two: bool = False,
) -> dict[str, Launch]:
    """The launches of an op on rows like x, memories and gains (meta tensors), by name."""
    k = Coefficients()
    local_dtype = None if local is None else local.dtype
    glob_dtype = glob.dtype if two and glob is not None else None
    out, forward = forward_launch(
        x, x, local, glob, w, k, 1e-6, local_dtype, glob_dtype, norm=True
    )
    given = (x, local, glob if two else None, x)
    dtypes = (x.dtype, x.dtype, local_dtype, None if glob is None else glob.dtype)
    _, backward = backward_launch(given, x, w, out.r, k, glob is not None, dtypes, w is not None)
    return {f"{name} forward": forward, f"{name} backward": backward}


# ---------------------------------------------------------------------------
# PyTorch closed form: the CPU path


def _combine(dtype: torch.dtype, *terms: tuple[float, Tensor | None]) -> Tensor | None:
    """The sum of factor * tensor in a new tensor; None where every term is missing or 0."""
    total: Tensor | None = None
    for factor, x in terms:
        if x is None or factor == 0:
            continue
        total = x.to(dtype).mul(factor) if total is None else total.add_(x, alpha=factor)
    return total


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
    local_new = _combine(dtype, (k.c, f), (k.b, local))
    if glob_dtype is None and k.e == k.q == 0:
        h_new = _combine(dtype, (k.a, h), (k.u, local_new), (k.v * k.g, glob))
        glob_new = None
    else:
        glob_new = _combine(dtype, (k.e, f), (k.q, local_new), (k.g, glob))
        h_new = _combine(dtype, (k.a, h), (k.u, local_new), (k.v, glob_new))
    h_new = torch.zeros_like(h, dtype=dtype) if h_new is None else h_new
    n = r = None
    if norm:
        r = rows.rstd(h_new, eps)
        n = h_new * r
        n = (n if w_next is None else n.mul_(w_next)).to(f.dtype)
        r = r.view(-1)
    written = (_as(local_new, h, local_dtype), _as(glob_new, h, glob_dtype))
    return h_new.to(h.dtype), *written, n, r


def _as(x: Tensor | None, like: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """x in the dtype asked for (None: not asked for); a missing x is zero."""
    if dtype is None:
        return None
    return torch.zeros_like(like, dtype=dtype) if x is None else x.to(dtype)


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
    like = next(x for x in gradients if x is not None)
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
    return [*(_as(x, like, t) for x, t in zip(found, dtypes, strict=True)), dw_next]


# ---------------------------------------------------------------------------
# The op


@torch.library.custom_op("deeploop::linear_update", mutates_args=())
def _forward(
    h: Tensor,
    f: Tensor,
    local: Tensor | None,
    glob: Tensor | None,
    w_next: Tensor | None,
    coefficients: Tensor,
    eps: float,
    local_dtype: torch.dtype | None,
    glob_dtype: torch.dtype | None,
    norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> h', L', G', n, r (the last one [rows], for the backward); empty where not asked for."""
    k = Coefficients(*coefficients.tolist())
    shape = h.shape
    inputs = (rows.as_rows(h), rows.as_rows(f), rows.maybe_rows(local), rows.maybe_rows(glob))
    w_next = rows.packed(w_next)
    args = (*inputs, w_next, k, eps, local_dtype, glob_dtype, norm)
    out: tuple[Tensor | None, ...]
    if rows.uses_triton(*inputs, w_next):
        out, launch = forward_launch(*args)
        launch.run(h)
    else:
        with rows.no_autocast(h):
            out = _forward_torch(*args)
    *full, r = out
    h_new, local_new, glob_new, n = (_empty(h) if x is None else x.view(shape) for x in full)
    return h_new, local_new, glob_new, n, _empty(h) if r is None else r


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(0)


@_forward.register_fake
def _(h, f, local, glob, w_next, coefficients, eps, local_dtype, glob_dtype, norm):
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
    coefficients: Tensor,
    has_glob: bool,
    dh_dtype: torch.dtype | None,
    df_dtype: torch.dtype | None,
    dlocal_dtype: torch.dtype | None,
    dglob_dtype: torch.dtype | None,
    need_next: bool,
) -> list[Tensor]:
    """The gradients a dtype is given for, in the order h, f, L, G, then that of w_next."""
    k = Coefficients(*coefficients.tolist())
    given = (dh_new, dlocal_new, dglob_new, dn)
    like = next(x for x in given if x is not None)
    gradients = tuple(rows.maybe_rows(x) for x in given)
    if dn is None:
        h_new = r = None
    h_new, w_next = rows.maybe_rows(h_new), rows.packed(w_next)
    dtypes = (dh_dtype, df_dtype, dlocal_dtype, dglob_dtype)
    args = (gradients, h_new, w_next, r, k, has_glob, dtypes, need_next and dn is not None)
    if rows.uses_triton(like, *gradients, w_next, r) and torch.float64 not in dtypes:
        (*found, partial), launch = backward_launch(*args)
        launch.run(like)
        dw_next = rows.gain_gradient(partial, w_next)
    else:
        with rows.no_autocast(like):
            *found, dw_next = _backward_torch(*args)
    if need_next and dw_next is None and w_next is not None:
        dw_next = torch.zeros_like(w_next)
    return rows.found(like.shape, *found) + rows.found(None, dw_next)


@_backward.register_fake
def _(
    dh_new, dlocal_new, dglob_new, dn, h_new, w_next, r, coefficients, has_glob,
    dh_dtype, df_dtype, dlocal_dtype, dglob_dtype, need_next,
):  # fmt: skip
    like = next(x for x in (dh_new, dlocal_new, dglob_new, dn) if x is not None)
    dtypes = (dh_dtype, df_dtype, dlocal_dtype, dglob_dtype)
    found = [like.new_empty(like.shape, dtype=t) for t in dtypes if t is not None]
    return found + ([w_next.new_empty(w_next.shape)] if need_next else [])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, f, local, glob, w_next, numbers, _, _, glob_dtype, norm = inputs
    h_new, _, _, _, r = output
    ctx.dtypes = [None if x is None else x.dtype for x in (h, f, local, glob)]
    ctx.has_glob = glob is not None or glob_dtype is not None
    ctx.save_for_backward(*((h_new, w_next, r) if norm else (None, None, None)), numbers)
    ctx.mark_non_differentiable(r)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
    given = gradients[:4]
    if all(x is None for x in given):
        return (None,) * 10
    needs = ctx.needs_input_grad[:5]
    dtypes = [t if need else None for t, need in zip(ctx.dtypes, needs[:4], strict=True)]
    found = iter(_backward(*given, *ctx.saved_tensors, ctx.has_glob, *dtypes, needs[4]))
    return (*(next(found) if need else None for need in needs), *(None,) * 5)


_forward.register_autograd(_gradients, setup_context=_save)
