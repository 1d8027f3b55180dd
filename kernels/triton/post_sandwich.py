"""The Triton kernels of post_sandwich, forward and backward, and their launches.

The formulas that these letters belong to are in the docstring of kernels/post_sandwich.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _launch
from .._launch import Launch, LaunchConfig, jit, tl
from .tiles import (
    gain_tile,
    load,
    load_or_one,
    load_or_zero,
    rsqrt_mean,
    store,
    store_chunks,
    store_sum,
    tile,
)


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
    """Both row means of the backward from its two row sums (see post_sandwich)."""
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
    store_sum(dw_out_ptr, b_dw_out, D, BLOCK)
    store_sum(dw_next_ptr, b_dw_next, D, BLOCK)


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
    store_chunks(dw_out_ptr, b_dw_out, group, own, D, BLOCK, CHUNKS)
    store_chunks(dw_next_ptr, b_dw_next, group, own, D, BLOCK, CHUNKS)


# ---------------------------------------------------------------------------
# Launches


def forward_launch(
    h: Tensor,
    f: Tensor,
    w_out: Tensor | None,
    w_next: Tensor | None,
    alpha: float,
    eps: float,
    norm: bool = True,
    config: LaunchConfig | None = None,
) -> tuple[tuple[Tensor, Tensor | None, Tensor, Tensor | None], Launch]:
    """Outputs still to be filled, and the launch that fills them; h and f are [rows, d]."""
    n_rows, d = h.shape
    h_new, n = torch.empty_like(h), torch.empty_like(f) if norm else None
    r1 = h.new_empty(n_rows, dtype=torch.float32)
    r2 = torch.empty_like(r1) if norm else None
    args = {
        "h_ptr": h, "f_ptr": f, "w_out_ptr": w_out, "w_next_ptr": w_next, "h_new_ptr": h_new,
        "n_ptr": n, "r1_ptr": r1, "r2_ptr": r2, "alpha": alpha, "eps": eps,
    }  # fmt: skip
    config = config or _launch.forward_config(d)
    return (h_new, n, r1, r2), _launch.forward_launch(post_sandwich_forward_kernel, args, h, config)


def backward_launch(
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
    config: LaunchConfig | None = None,
) -> tuple[list[Tensor | None], Launch]:
    """dh, df and the partial dw_out, dw_next still to be filled, and their launch."""
    n_rows, d = h.shape
    config = config or _launch.backward_config(d, h.element_size(), gains=2)
    groups = _launch.programs(h, config)
    dh = torch.empty_like(h) if needs[0] else None
    df = torch.empty_like(f) if needs[1] else None
    partials = [h.new_empty(groups, d, dtype=torch.float32) if need else None for need in needs[2:]]
    args = {
        "dh_new_ptr": dh_new, "dn_ptr": dn, "h_ptr": h, "f_ptr": f, "w_out_ptr": w_out,
        "w_next_ptr": w_next, "r1_ptr": r1, "r2_ptr": r2, "dh_ptr": dh, "df_ptr": df,
        "dw_out_ptr": partials[0], "dw_next_ptr": partials[1], "n_rows": n_rows, "alpha": alpha,
        "eps": eps, "D": d,
    }  # fmt: skip
    kernels = (post_sandwich_backward_kernel, post_sandwich_backward_wide_kernel)
    return [dh, df, *partials], _launch.backward_launch(*kernels, args, groups, config)


def aot_launches(x: Tensor, w: Tensor, config: LaunchConfig | None = None) -> dict[str, Launch]:
    """Every launch on rows like x and gains like w (meta tensors), by name."""
    (_, _, r1, r2), forward = forward_launch(x, x, w, w, 1.0, 1e-6, config=config)
    assert r2 is not None
    _, backward = backward_launch(x, x, x, x, w, w, r1, r2, 1.0, 1e-6, [True] * 4, config)
    return {"post_sandwich forward": forward, "post_sandwich backward": backward}
