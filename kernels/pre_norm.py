"""pre_norm: residual add and the next visit's norm in one pass.

Forward, per row of d values (w_next one gain per column, or None for all ones):

    h' = h + scale * f
    n  = h' * r * w_next          r = 1 / sqrt(mean(h'^2) + eps)

Backward, from dh' and dn (either may be missing), with y = h' * r:

    m  = mean(dn * w_next * y)
    dh = dh' + r * (dn * w_next - y * m)             df = scale * dh
    dw_next = sum over rows of dn * y

Shapes: h, f [..., d]; w_next [d]; h' and n like h. Dtypes: h' as h, n as f, each
gradient as its tensor; arithmetic float32 (float64 if any input is), n from the
unrounded h'. scale is a run-time argument of the kernels, so a new value
compiles no new kernel; torch.compile keeps each value it meets as a constant.

Bytes, in passes over [rows, d] (beside O(rows) statistics and O(d) gains):
forward 4 (reads h, f; writes h', n), backward 5 (reads dh', dn, h'; writes dh,
df). Only h', which the next visit holds anyway, and r are saved. At scale 1 and
equal dtypes dh and df are equal in value and one tensor could serve as both,
for 4 passes; they are written separately all the same, because a consumer that
works in place on one of them would change the other.

The gain's gradient is added up as in post_sandwich: float32 partial sums, no
atomics. Up to d = 2048 the backward holds the row in registers; wider rows are
read in chunks, and h' and dn a second time, out of L1 or L2. Speed on a GPU: not
yet measured.

Source: the pre-norm block (arXiv 2002.04745); scale = lambda / (R sqrt K) is
arXiv 2606.18524.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rows
from .inject import inject
from .rows import (
    Config,
    Launch,
    gain_tile,
    jit,
    load,
    load_or_one,
    load_or_zero,
    rsqrt_mean,
    store,
    tile,
    tl,
)


def pre_norm(
    h: Tensor,
    f: Tensor,
    w_next: Tensor | None,
    scale: float = 1.0,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, rows.Normed]:
    """h' = h + scale * f ; n = RMSNorm(h') * w_next, or None where norm is off."""
    rows.check_rows("pre_norm", h=h, f=f)
    rows.check_gains("pre_norm", h, w_next=w_next)
    rows.check_norm("pre_norm", norm, w_next)
    if not norm:
        rows.check_untraced("pre_norm", eps, scale=scale)
        return inject(h, f, None, 1.0, scale, eps, norm=False)
    h_new, n, _ = _forward(h, f, w_next, scale, eps)
    return h_new, n


# ---------------------------------------------------------------------------
# Triton kernels


@jit(do_not_specialize=["n_rows", "scale", "eps"])
def pre_norm_forward_kernel(
    h_ptr, f_ptr, w_next_ptr, h_new_ptr, n_ptr, r_ptr, n_rows, scale, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    o, o_gain, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
    base = first * D
    b_h = load(h_ptr + base, o, m) + load(f_ptr + base, o, m) * scale
    store(h_new_ptr + base, o, b_h, m)
    b_r = rsqrt_mean(b_h, D, eps)
    b_n = b_h * b_r[:, None]
    if w_next_ptr is not None:
        b_n *= load(w_next_ptr, o_gain, m)
    store(n_ptr + base, o, b_n, m)
    tl.store(r_ptr + first + o_row, b_r, mask=m_row)


@jit()
def _read(dn_ptr, h_new_ptr, base, o, m, b_w):
    """h', dn and dn * w_next of one tile."""
    b_dn = load_or_zero(dn_ptr, base, o, m)
    return load(h_new_ptr + base, o, m), b_dn, b_dn * b_w


@jit()
def _write(dh_ptr, df_ptr, base, o, m, scale, b_dh, b_h, b_dn, b_dnw, b_r, b_mean):
    """Store dh and df of one tile; return what it adds to dw_next."""
    b_y = b_h * b_r
    b_dx = b_dh + b_r * (b_dnw - b_y * b_mean)
    if dh_ptr is not None:
        store(dh_ptr + base, o, b_dx, m)
    if df_ptr is not None:
        store(df_ptr + base, o, b_dx * scale, m)
    return b_dn * b_y


@jit(do_not_specialize=["n_rows", "scale"])
def pre_norm_backward_kernel(
    dh_new_ptr, dn_ptr, h_new_ptr, w_next_ptr, r_ptr, dh_ptr, df_ptr, dw_next_ptr, n_rows,
    scale,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers, read once."""
    b_w = gain_tile(w_next_ptr, D, BLOCK, ROWS)
    b_dw_next = tl.zeros((ROWS, BLOCK), tl.float32)
    n_blocks, step = tl.cdiv(n_rows, ROWS), tl.num_programs(0)
    for block in tl.range(tl.program_id(0), n_blocks, step, num_stages=STAGES):
        first = tl.cast(block, tl.int64) * ROWS
        o, _, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
        base = first * D
        b_r = load(r_ptr + first, o_row, m_row)[:, None]
        b_h, b_dn, b_dnw = _read(dn_ptr, h_new_ptr, base, o, m, b_w)
        # Before the sum, which all warps wait for: a load after it would wait for memory anew.
        b_dh = load_or_zero(dh_new_ptr, base, o, m)
        b_mean = tl.sum(b_dnw * b_h, axis=1)[:, None] * b_r / D
        b_dw_next += _write(dh_ptr, df_ptr, base, o, m, scale, b_dh, b_h, b_dn, b_dnw, b_r, b_mean)
    if dw_next_ptr is not None:
        o_col = tl.arange(0, BLOCK)
        o = tl.program_id(0) * D + o_col
        tl.store(dw_next_ptr + o, tl.sum(b_dw_next, axis=0), mask=o_col < D)


@jit(do_not_specialize=["n_rows", "n_chunks", "scale"])
def pre_norm_backward_wide_kernel(
    dh_new_ptr, dn_ptr, h_new_ptr, w_next_ptr, r_ptr, dh_ptr, df_ptr, dw_next_ptr, n_rows,
    n_chunks, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row in chunks; h' and dn are read twice, the second time from L1 or L2."""
    o_tile = tl.arange(0, BLOCK)
    b_zero = tl.zeros((BLOCK,), tl.float32)
    b_dw_next = (b_zero,) * CHUNKS
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        base = tl.cast(row, tl.int64) * D
        b_r = tl.load(r_ptr + row)
        b_sum = b_zero
        # As in post_sandwich: two chunks in flight, a bound known at run time only.
        for pair in tl.range(0, n_chunks, 2, num_stages=STAGES):
            for half in tl.static_range(2):
                o = (pair + half) * BLOCK + o_tile
                b_w = load_or_one(w_next_ptr, o, o < D)
                b_h, b_dn, b_dnw = _read(dn_ptr, h_new_ptr, base, o, o < D, b_w)
                b_sum += b_dnw * b_h
        b_mean = tl.sum(b_sum) * b_r / D
        b_next = b_dw_next[:0]
        for chunk in tl.static_range(CHUNKS):
            o = chunk * BLOCK + o_tile
            b_w = load_or_one(w_next_ptr, o, o < D)
            b_h, b_dn, b_dnw = _read(dn_ptr, h_new_ptr, base, o, o < D, b_w)
            b_dh = load_or_zero(dh_new_ptr, base, o, o < D)
            b_dw = _write(
                dh_ptr, df_ptr, base, o, o < D, scale, b_dh, b_h, b_dn, b_dnw, b_r, b_mean
            )
            b_next += (b_dw_next[chunk] + b_dw,)
        b_dw_next = b_next
    if dw_next_ptr is not None:
        for chunk in tl.static_range(CHUNKS):
            o_col = chunk * BLOCK + o_tile
            o = tl.program_id(0) * D + o_col
            tl.store(dw_next_ptr + o, b_dw_next[chunk], mask=o_col < D)


# ---------------------------------------------------------------------------
# Launches


def _forward_launch(
    h: Tensor,
    f: Tensor,
    w_next: Tensor | None,
    scale: float,
    eps: float,
    config: Config | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], Launch]:
    """Outputs still to be filled, and the launch that fills them; h and f are [rows, d]."""
    n_rows, d = h.shape
    config = config or rows.forward_config(d)
    h_new, n = torch.empty_like(h), torch.empty_like(f)
    r = h.new_empty(n_rows, dtype=torch.float32)
    args = {
        "h_ptr": h, "f_ptr": f, "w_next_ptr": w_next, "h_new_ptr": h_new, "n_ptr": n,
        "r_ptr": r, "n_rows": n_rows, "scale": scale, "eps": eps, "D": d, "BLOCK": config.block,
        "ROWS": config.rows,
    }  # fmt: skip
    grid = -(-n_rows // config.rows)
    return (h_new, n, r), Launch(pre_norm_forward_kernel, grid, args, config)


def _backward_launch(
    dh_new: Tensor | None,
    dn: Tensor | None,
    h_new: Tensor,
    w_next: Tensor | None,
    r: Tensor,
    scale: float,
    f_dtype: torch.dtype,
    needs: list[bool],
    config: Config | None = None,
) -> tuple[list[Tensor | None], Launch]:
    """dh, df and the partial dw_next still to be filled, and their launch."""
    n_rows, d = h_new.shape
    config = config or rows.backward_config(d, h_new.element_size(), gains=1)
    groups = rows.programs(h_new, config)
    dh = torch.empty_like(h_new) if needs[0] else None
    df = torch.empty_like(h_new, dtype=f_dtype) if needs[1] else None
    partial = h_new.new_empty(groups, d, dtype=torch.float32) if needs[2] else None
    args = {
        "dh_new_ptr": dh_new, "dn_ptr": dn, "h_new_ptr": h_new, "w_next_ptr": w_next,
        "r_ptr": r, "dh_ptr": dh, "df_ptr": df, "dw_next_ptr": partial, "n_rows": n_rows,
        "scale": scale, "D": d, "BLOCK": config.block, "STAGES": config.stages,
    }  # fmt: skip
    if config.chunks == 1:
        kernel, args["ROWS"] = pre_norm_backward_kernel, config.rows
    else:
        kernel = pre_norm_backward_wide_kernel
        args |= {"n_chunks": config.chunks, "CHUNKS": config.chunks}
    return [dh, df, partial], Launch(kernel, groups, args, config)


def aot_launches(x: Tensor, w: Tensor, config: Config | None = None) -> dict[str, Launch]:
    """Every launch on rows like x and gains like w (meta tensors), by name."""
    (_, _, r), forward = _forward_launch(x, x, w, 1.0, 1e-6, config)
    _, backward = _backward_launch(x, x, x, w, r, 1.0, x.dtype, [True] * 3, config)
    return {"pre_norm forward": forward, "pre_norm backward": backward}


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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dh, df, dw_next; the gain is folded into row scalars where that saves a pass."""
    dtype, d = r.dtype, h_new.shape[-1]
    need_h, need_f, need_next = needs
    total = None if dh_new is None else dh_new.to(dtype)
    dw_next = None
    if dn is not None:
        x, dn, r = h_new.to(dtype), dn.to(dtype), r[:, None]
        product = dn * x
        if need_next and w_next is not None:
            dw_next = rows.column_sum(product, r, w_next.dtype)
        if need_h or need_f:
            mean = rows.row_sum(product, w_next) * (r / d)
            normed = dn * r if w_next is None else torch.mul(dn, w_next, out=product).mul_(r)
            normed.addcmul_(x, mean * (r * r), value=-1)
            total = normed if total is None else normed.add_(total)
    elif need_next and w_next is not None:
        dw_next = torch.zeros_like(w_next)
    dh = df = None
    if total is not None:
        df = (total * scale).to(f_dtype) if need_f else None
        # With no norm to go through, total is the gradient that came in, and an
        # output must not alias an input.
        dh = total.to(h_new.dtype, copy=dn is None) if need_h else None
    return dh, df, dw_next


# ---------------------------------------------------------------------------
# The op


@torch.library.custom_op("deeploop::pre_norm", mutates_args=())
def _forward(
    h: Tensor, f: Tensor, w_next: Tensor | None, scale: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-> h', n, r (the last one [rows], for the backward)."""
    rows.check_numbers("pre_norm", eps, scale=scale)
    shape, h, f, w_next = h.shape, rows.as_rows(h), rows.as_rows(f), rows.packed(w_next)
    if rows.uses_triton(h, f, w_next):
        (h_new, n, r), launch = _forward_launch(h, f, w_next, scale, eps)
        launch.run(h)
    else:
        with rows.no_autocast(h):
            h_new, n, r = _forward_torch(h, f, w_next, scale, eps)
    return h_new.view(shape), n.view(shape), r


@_forward.register_fake
def _(h, f, w_next, scale, eps):
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
    shape, h_new, w_next = h_new.shape, rows.as_rows(h_new), rows.packed(w_next)
    dh_new, dn = rows.maybe_rows(dh_new), rows.maybe_rows(dn)
    args = (dh_new, dn, h_new, w_next, r, scale, f_dtype, needs)
    if rows.uses_triton(h_new, r, w_next):
        (dh, df, dw_next), launch = _backward_launch(*args)
        launch.run(h_new)
        dw_next = rows.gain_gradient(dw_next, w_next)
    else:
        with rows.no_autocast(h_new):
            dh, df, dw_next = _backward_torch(*args)
    return rows.found(shape, dh, df) + rows.found(None, dw_next)


@_backward.register_fake
def _(dh_new, dn, h_new, w_next, r, scale, f_dtype, needs):
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
