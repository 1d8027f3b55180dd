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
# Triton kernels


@jit(do_not_specialize=["n_rows", "alpha", "eps"])
def post_sandwich_forward_kernel(
    h_ptr, f_ptr, w_out_ptr, w_next_ptr, h_new_ptr, n_ptr, r1_ptr, r2_ptr, n_rows, alpha, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    o, o_gain, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
    base = first * D
    b_z = load(h_ptr + base, o, m) * alpha + load(f_ptr + base, o, m)
    b_r1 = rsqrt_mean(b_z, D, eps)
    if w_out_ptr is not None:
        b_z *= load(w_out_ptr, o_gain, m)
    # From here only z * w_out is alive. h' is r1 times it, so its mean square
    # needs no rounded value.
    if n_ptr is not None:
        b_r2 = rsqrt_mean(b_z * b_r1[:, None], D, eps)
    b_h = b_z * b_r1[:, None]
    store(h_new_ptr + base, o, b_h, m)
    if n_ptr is not None:
        b_n = b_h * b_r2[:, None]
        if w_next_ptr is not None:
            b_n *= load(w_next_ptr, o_gain, m)
        store(n_ptr + base, o, b_n, m)
        tl.store(r2_ptr + first + o_row, b_r2, mask=m_row)
    tl.store(r1_ptr + first + o_row, b_r1, mask=m_row)


@jit()
def _read(h_ptr, f_ptr, dh_new_ptr, dn_ptr, base, o, m, alpha, b_w_out, b_w_next):
    """z, z * w_out, dh', dn and dn * w_next of one tile."""
    b_z = load(h_ptr + base, o, m) * alpha + load(f_ptr + base, o, m)
    b_dh = load_or_zero(dh_new_ptr, base, o, m)
    b_dn = load_or_zero(dn_ptr, base, o, m)
    return b_z, b_z * b_w_out, b_dh, b_dn, b_dn * b_w_next


@jit()
def _means(b_sum_1, b_sum_2, b_r1, b_r2, eps, D):
    """Both row means of the backward from its two row sums (see the docstring)."""
    b_mean_2 = b_sum_2 * b_r1 * b_r2 / D
    return b_sum_1 * b_r1 / D + b_mean_2 * eps * b_r2 * b_r2, b_mean_2


@jit()
def _write(
    dh_ptr, df_ptr, base, o, m, alpha, b_w_out,
    b_z, b_zw, b_dh, b_dn, b_dnw, b_r1, b_r2, b_mean_1, b_mean_2,
):  # fmt: skip
    """Store dh and df of one tile; return what it adds to dw_out and dw_next."""
    b_y2 = b_zw * (b_r1 * b_r2)
    b_total = b_dh + b_r2 * (b_dnw - b_y2 * b_mean_2)
    b_y1 = b_z * b_r1
    b_dw_out = b_total * b_y1
    b_dw_next = b_dn * b_y2
    b_dz = b_r1 * (b_total * b_w_out - b_y1 * b_mean_1)
    if dh_ptr is not None:
        store(dh_ptr + base, o, b_dz * alpha, m)
    if df_ptr is not None:
        store(df_ptr + base, o, b_dz, m)
    return b_dw_out, b_dw_next


@jit(do_not_specialize=["n_rows", "alpha", "eps"])
def post_sandwich_backward_kernel(
    dh_new_ptr, dn_ptr, h_ptr, f_ptr, w_out_ptr, w_next_ptr, r1_ptr, r2_ptr, dh_ptr, df_ptr,
    dw_out_ptr, dw_next_ptr, n_rows, alpha, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers, read once."""
    b_w_out = gain_tile(w_out_ptr, D, BLOCK, ROWS)
    b_w_next = gain_tile(w_next_ptr, D, BLOCK, ROWS)
    b_dw_out = tl.zeros((ROWS, BLOCK), tl.float32)
    b_dw_next = tl.zeros((ROWS, BLOCK), tl.float32)
    n_blocks, step = tl.cdiv(n_rows, ROWS), tl.num_programs(0)
    for block in tl.range(tl.program_id(0), n_blocks, step, num_stages=STAGES):
        first = tl.cast(block, tl.int64) * ROWS
        o, _, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
        base = first * D
        b_r1 = load(r1_ptr + first, o_row, m_row)[:, None]
        b_r2 = load(r2_ptr + first, o_row, m_row)[:, None]
        b_z, b_zw, b_dh, b_dn, b_dnw = _read(
            h_ptr, f_ptr, dh_new_ptr, dn_ptr, base, o, m, alpha, b_w_out, b_w_next
        )
        b_sum_1 = tl.sum(b_dh * b_zw, axis=1)[:, None]
        b_sum_2 = tl.sum(b_dnw * b_zw, axis=1)[:, None]
        b_mean_1, b_mean_2 = _means(b_sum_1, b_sum_2, b_r1, b_r2, eps, D)
        b_1, b_2 = _write(
            dh_ptr, df_ptr, base, o, m, alpha, b_w_out,
            b_z, b_zw, b_dh, b_dn, b_dnw, b_r1, b_r2, b_mean_1, b_mean_2,
        )  # fmt: skip
        b_dw_out += b_1
        b_dw_next += b_2
    o_col = tl.arange(0, BLOCK)
    o = tl.program_id(0) * D + o_col
    if dw_out_ptr is not None:
        tl.store(dw_out_ptr + o, tl.sum(b_dw_out, axis=0), mask=o_col < D)
    if dw_next_ptr is not None:
        tl.store(dw_next_ptr + o, tl.sum(b_dw_next, axis=0), mask=o_col < D)


@jit(do_not_specialize=["n_rows", "n_chunks", "alpha", "eps"])
def post_sandwich_backward_wide_kernel(
    dh_new_ptr, dn_ptr, h_ptr, f_ptr, w_out_ptr, w_next_ptr, r1_ptr, r2_ptr, dh_ptr, df_ptr,
    dw_out_ptr, dw_next_ptr, n_rows, n_chunks, alpha, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A row in chunks, read twice: for its sums, then (from L1 or L2) for its gradients.

    SPLITS programs share a row: each sums all of it and writes its own CHUNKS.
    """
    group = tl.program_id(0) // SPLITS
    own = tl.program_id(0) % SPLITS * CHUNKS
    o_tile = tl.arange(0, BLOCK)
    b_zero = tl.zeros((BLOCK,), tl.float32)
    b_dw_out = (b_zero,) * CHUNKS
    b_dw_next = (b_zero,) * CHUNKS
    for row in range(group, n_rows, tl.num_programs(0) // SPLITS):
        base = tl.cast(row, tl.int64) * D
        b_r1 = tl.load(r1_ptr + row)
        b_r2 = tl.load(r2_ptr + row)
        b_sum_1 = b_zero
        b_sum_2 = b_zero
        # Two chunks at a time: enough loads in flight to cover their latency. The
        # bound is only known at run time, or the compiler unrolls the whole row
        # and keeps so many loads in registers that others spill.
        for pair in tl.range(0, n_chunks, 2, num_stages=STAGES):
            for half in tl.static_range(2):
                o = (pair + half) * BLOCK + o_tile
                b_w_out = load_or_one(w_out_ptr, o, o < D)
                b_w_next = load_or_one(w_next_ptr, o, o < D)
                b_z, b_zw, b_dh, b_dn, b_dnw = _read(
                    h_ptr, f_ptr, dh_new_ptr, dn_ptr, base, o, o < D, alpha, b_w_out, b_w_next
                )
                b_sum_1 += b_dh * b_zw
                b_sum_2 += b_dnw * b_zw
        b_mean_1, b_mean_2 = _means(tl.sum(b_sum_1), tl.sum(b_sum_2), b_r1, b_r2, eps, D)
        # A tuple has no item assignment: the next pair is built up and swapped in.
        next_out = b_dw_out[:0]
        next_next = b_dw_next[:0]
        for chunk in tl.static_range(CHUNKS):
            o = (own + chunk) * BLOCK + o_tile
            b_w_out = load_or_one(w_out_ptr, o, o < D)
            b_w_next = load_or_one(w_next_ptr, o, o < D)
            b_z, b_zw, b_dh, b_dn, b_dnw = _read(
                h_ptr, f_ptr, dh_new_ptr, dn_ptr, base, o, o < D, alpha, b_w_out, b_w_next
            )
            b_1, b_2 = _write(
                dh_ptr, df_ptr, base, o, o < D, alpha, b_w_out,
                b_z, b_zw, b_dh, b_dn, b_dnw, b_r1, b_r2, b_mean_1, b_mean_2,
            )  # fmt: skip
            next_out += (b_dw_out[chunk] + b_1,)
            next_next += (b_dw_next[chunk] + b_2,)
        b_dw_out = next_out
        b_dw_next = next_next
    for chunk in tl.static_range(CHUNKS):
        o_col = (own + chunk) * BLOCK + o_tile
        o = group * D + o_col
        if dw_out_ptr is not None:
            tl.store(dw_out_ptr + o, b_dw_out[chunk], mask=o_col < D)
        if dw_next_ptr is not None:
            tl.store(dw_next_ptr + o, b_dw_next[chunk], mask=o_col < D)


# ---------------------------------------------------------------------------
# Launches


def _forward_launch(
    h: Tensor,
    f: Tensor,
    w_out: Tensor | None,
    w_next: Tensor | None,
    alpha: float,
    eps: float,
    norm: bool = True,
    config: Config | None = None,
) -> tuple[tuple[Tensor, Tensor | None, Tensor, Tensor | None], Launch]:
    """Outputs still to be filled, and the launch that fills them; h and f are [rows, d]."""
    n_rows, d = h.shape
    config = config or rows.forward_config(d)
    h_new, n = torch.empty_like(h), torch.empty_like(f) if norm else None
    r1 = h.new_empty(n_rows, dtype=torch.float32)
    r2 = torch.empty_like(r1) if norm else None
    args = {
        "h_ptr": h, "f_ptr": f, "w_out_ptr": w_out, "w_next_ptr": w_next, "h_new_ptr": h_new,
        "n_ptr": n, "r1_ptr": r1, "r2_ptr": r2, "n_rows": n_rows, "alpha": alpha, "eps": eps,
        "D": d, "BLOCK": config.block, "ROWS": config.rows,
    }  # fmt: skip
    grid = -(-n_rows // config.rows)
    return (h_new, n, r1, r2), Launch(post_sandwich_forward_kernel, grid, args, config)


def _backward_launch(
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
    config: Config | None = None,
) -> tuple[list[Tensor | None], Launch]:
    """dh, df and the partial dw_out, dw_next still to be filled, and their launch."""
    n_rows, d = h.shape
    config = config or rows.backward_config(d, h.element_size(), gains=2)
    groups = rows.programs(h, config)
    dh = torch.empty_like(h) if needs[0] else None
    df = torch.empty_like(f) if needs[1] else None
    partials = [h.new_empty(groups, d, dtype=torch.float32) if need else None for need in needs[2:]]
    args = {
        "dh_new_ptr": dh_new, "dn_ptr": dn, "h_ptr": h, "f_ptr": f, "w_out_ptr": w_out,
        "w_next_ptr": w_next, "r1_ptr": r1, "r2_ptr": r2, "dh_ptr": dh, "df_ptr": df,
        "dw_out_ptr": partials[0], "dw_next_ptr": partials[1], "n_rows": n_rows, "alpha": alpha,
        "eps": eps, "D": d, "BLOCK": config.block, "STAGES": config.stages,
    }  # fmt: skip
    if config.chunks == 1:
        kernel, args["ROWS"] = post_sandwich_backward_kernel, config.rows
    else:
        kernel = post_sandwich_backward_wide_kernel
        args |= {"n_chunks": config.chunks, "CHUNKS": config.chunks // config.splits}
        args["SPLITS"] = config.splits
    return [dh, df, *partials], Launch(kernel, groups * config.splits, args, config)


def aot_launches(x: Tensor, w: Tensor, config: Config | None = None) -> dict[str, Launch]:
    """Every launch on rows like x and gains like w (meta tensors), by name."""
    (_, _, r1, r2), forward = _forward_launch(x, x, w, w, 1.0, 1e-6, config=config)
    assert r2 is not None
    _, backward = _backward_launch(x, x, x, x, w, w, r1, r2, 1.0, 1e-6, [True] * 4, config)
    return {"post_sandwich forward": forward, "post_sandwich backward": backward}


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
    elif need_next and w_next is not None:
        dw_next = torch.zeros_like(w_next)
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
    if rows.uses_triton(h, f, w_out, w_next):
        (h_new, n, r1, r2), launch = _forward_launch(h, f, w_out, w_next, alpha, eps, norm)
        launch.run(h)
    else:
        with rows.no_autocast(h):
            h_new, n, r1, r2 = _forward_torch(h, f, w_out, w_next, alpha, eps, norm)
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
    args = (dh_new, dn, h, f, w_out, w_next, r1, r2, *numbers.tolist(), needs)
    if rows.uses_triton(h, f, w_out, w_next):
        (dh, df, dw_out, dw_next), launch = _backward_launch(*args)
        launch.run(h)
        dw_out = rows.gain_gradient(dw_out, w_out)
        dw_next = rows.gain_gradient(dw_next, w_next)
    else:
        with rows.no_autocast(h):
            dh, df, dw_out, dw_next = _backward_torch(*args)
    return rows.found(shape, dh, df) + rows.found(None, dw_out, dw_next)


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
