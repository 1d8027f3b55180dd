"""The Triton kernels of branch_sandwich, forward and backward, and their launches.

The formulas that these letters belong to are in the docstring of kernels/branch_sandwich.py.
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


@jit(do_not_specialize=["n_rows", "scale", "eps"])
def branch_sandwich_forward_kernel(
    h_ptr, f_ptr, w_branch_ptr, w_next_ptr, h_new_ptr, n_ptr, r1_ptr, r2_ptr, n_rows, scale, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    o, o_gain, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
    base = first * D
    b_f = load(f_ptr + base, o, m)
    b_h = load(h_ptr + base, o, m)
    b_r1 = rsqrt_mean(b_f, D, eps)
    if w_branch_ptr is not None:
        b_f *= load(w_branch_ptr, o_gain, m)
    b_h += b_f * (b_r1 * scale)[:, None]
    store(h_new_ptr + base, o, b_h, m)
    tl.store(r1_ptr + first + o_row, b_r1, mask=m_row)
    if n_ptr is not None:
        b_r2 = rsqrt_mean(b_h, D, eps)
        b_n = b_h * b_r2[:, None]
        if w_next_ptr is not None:
            b_n *= load(w_next_ptr, o_gain, m)
        store(n_ptr + base, o, b_n, m)
        tl.store(r2_ptr + first + o_row, b_r2, mask=m_row)


@jit()
def _read(f_ptr, dh_new_ptr, base, o, m, b_w_branch):
    """f, f * w_branch and dh' of one tile."""
    b_f = load(f_ptr + base, o, m)
    return b_f, b_f * b_w_branch, load_or_zero(dh_new_ptr, base, o, m)


@jit()
def _read_norm(h_ptr, dn_ptr, base, o, m, b_fw, b_scale, b_w_next):
    """h' (made again from h and fw), dn and dn * w_next of one tile."""
    b_h = load(h_ptr + base, o, m) + b_fw * b_scale
    b_dn = load(dn_ptr + base, o, m)
    return b_h, b_dn, b_dn * b_w_next


@jit()
def _write(dh_ptr, df_ptr, base, o, m, scale, b_w_branch, b_f, b_total, b_r1, b_mean_1):
    """Store dh and df of one tile; return what it adds to dw_branch."""
    b_y1 = b_f * b_r1
    b_dw = b_total * b_y1 * scale
    if dh_ptr is not None:
        store(dh_ptr + base, o, b_total, m)
    if df_ptr is not None:
        store(df_ptr + base, o, (b_total * b_w_branch - b_y1 * b_mean_1) * (b_r1 * scale), m)
    return b_dw


@jit(do_not_specialize=["n_rows", "scale"])
def branch_sandwich_backward_kernel(
    dh_new_ptr, dn_ptr, h_ptr, f_ptr, w_branch_ptr, w_next_ptr, r1_ptr, r2_ptr, dh_ptr, df_ptr,
    dw_branch_ptr, dw_next_ptr, n_rows, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers, read once."""
    b_w_branch = gain_tile(w_branch_ptr, D, BLOCK, ROWS)
    b_w_next = gain_tile(w_next_ptr, D, BLOCK, ROWS)
    b_dw_branch = tl.zeros((ROWS, BLOCK), tl.float32)
    b_dw_next = tl.zeros((ROWS, BLOCK), tl.float32)
    n_blocks, step = tl.cdiv(n_rows, ROWS), tl.num_programs(0)
    for block in tl.range(tl.program_id(0), n_blocks, step, num_stages=STAGES):
        first = tl.cast(block, tl.int64) * ROWS
        o, _, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
        base = first * D
        b_r1 = load(r1_ptr + first, o_row, m_row)[:, None]
        b_f, b_fw, b_total = _read(f_ptr, dh_new_ptr, base, o, m, b_w_branch)
        if dn_ptr is not None:
            b_r2 = load(r2_ptr + first, o_row, m_row)[:, None]
            b_h, b_dn, b_dnw = _read_norm(h_ptr, dn_ptr, base, o, m, b_fw, b_r1 * scale, b_w_next)
            b_y2 = b_h * b_r2
            b_mean_2 = tl.sum(b_dnw * b_y2, axis=1)[:, None] / D
            b_total += b_r2 * (b_dnw - b_y2 * b_mean_2)
            b_dw_next += b_dn * b_y2
        b_mean_1 = tl.sum(b_total * (b_fw * b_r1), axis=1)[:, None] / D
        b_dw_branch += _write(
            dh_ptr, df_ptr, base, o, m, scale, b_w_branch, b_f, b_total, b_r1, b_mean_1
        )
    store_sum(dw_branch_ptr, b_dw_branch, D, BLOCK)
    store_sum(dw_next_ptr, b_dw_next, D, BLOCK)


@jit()
def _means(
    dh_new_ptr, dn_ptr, h_ptr, f_ptr, w_branch_ptr, w_next_ptr, base, b_r1, b_r2, n_chunks, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """m1 and m2 from one sweep over a row: three sums are enough, for T is linear in m2.

    Sums are of normed values: where a mean square overflows they are 0, not infinite.
    """
    b_sum = tl.zeros((BLOCK,), tl.float32)
    b_sum_h = tl.zeros((BLOCK,), tl.float32)
    b_sum_n = tl.zeros((BLOCK,), tl.float32)
    # As in post_sandwich: two chunks in flight, a bound known at run time only.
    for pair in tl.range(0, n_chunks, 2, num_stages=STAGES):
        for half in tl.static_range(2):
            o = (pair + half) * BLOCK + tl.arange(0, BLOCK)
            b_w_branch = load_or_one(w_branch_ptr, o, o < D)
            _, b_fw, b_total = _read(f_ptr, dh_new_ptr, base, o, o < D, b_w_branch)
            b_y1 = b_fw * b_r1
            if dn_ptr is not None:
                b_w_next = load_or_one(w_next_ptr, o, o < D)
                b_h, _, b_dnw = _read_norm(
                    h_ptr, dn_ptr, base, o, o < D, b_fw, b_r1 * scale, b_w_next
                )
                b_y2 = b_h * b_r2
                b_total += b_dnw * b_r2
                b_sum_h += b_y2 * b_y1
                b_sum_n += b_dnw * b_y2
            b_sum += b_total * b_y1
    b_mean_2 = tl.sum(b_sum_n) / D
    return (tl.sum(b_sum) - b_r2 * b_mean_2 * tl.sum(b_sum_h)) / D, b_mean_2


@jit(do_not_specialize=["n_rows", "n_chunks", "scale"])
def branch_sandwich_backward_wide_kernel(
    dh_new_ptr, dn_ptr, h_ptr, f_ptr, w_branch_ptr, w_next_ptr, r1_ptr, r2_ptr, dh_ptr, df_ptr,
    dw_branch_ptr, dw_next_ptr, n_rows, n_chunks, scale,
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
    b_dw_branch = (b_zero,) * CHUNKS
    b_dw_next = (b_zero,) * CHUNKS
    for row in range(group, n_rows, tl.num_programs(0) // SPLITS):
        base = tl.cast(row, tl.int64) * D
        b_r1 = tl.load(r1_ptr + row)
        b_r2 = 0.0
        if dn_ptr is not None:
            b_r2 = tl.load(r2_ptr + row)
        b_mean_1, b_mean_2 = _means(
            dh_new_ptr, dn_ptr, h_ptr, f_ptr, w_branch_ptr, w_next_ptr, base, b_r1, b_r2, n_chunks,
            scale, D, BLOCK, STAGES,
        )  # fmt: skip
        # A tuple has no item assignment: the next pair is built up and swapped in.
        next_branch = b_dw_branch[:0]
        next_next = b_dw_next[:0]
        for chunk in tl.static_range(CHUNKS):
            o = (own + chunk) * BLOCK + o_tile
            b_w_branch = load_or_one(w_branch_ptr, o, o < D)
            b_f, b_fw, b_total = _read(f_ptr, dh_new_ptr, base, o, o < D, b_w_branch)
            b_dw = b_zero
            if dn_ptr is not None:
                b_w_next = load_or_one(w_next_ptr, o, o < D)
                b_h, b_dn, b_dnw = _read_norm(
                    h_ptr, dn_ptr, base, o, o < D, b_fw, b_r1 * scale, b_w_next
                )
                b_y2 = b_h * b_r2
                b_total += b_r2 * (b_dnw - b_y2 * b_mean_2)
                b_dw = b_dn * b_y2
            next_next += (b_dw_next[chunk] + b_dw,)
            b_dw = _write(
                dh_ptr, df_ptr, base, o, o < D, scale, b_w_branch, b_f, b_total, b_r1, b_mean_1
            )
            next_branch += (b_dw_branch[chunk] + b_dw,)
        b_dw_branch = next_branch
        b_dw_next = next_next
    store_chunks(dw_branch_ptr, b_dw_branch, group, own, D, BLOCK, CHUNKS)
    store_chunks(dw_next_ptr, b_dw_next, group, own, D, BLOCK, CHUNKS)


# ---------------------------------------------------------------------------
# Launches


def forward_launch(
    h: Tensor,
    f: Tensor,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    scale: float,
    eps: float,
    norm: bool,
    config: LaunchConfig | None = None,
) -> tuple[tuple[Tensor | None, ...], Launch]:
    """Outputs still to be filled, and the launch that fills them; h and f are [rows, d]."""
    n_rows, d = h.shape
    h_new, n = torch.empty_like(h), torch.empty_like(f) if norm else None
    r1 = h.new_empty(n_rows, dtype=torch.float32)
    r2 = torch.empty_like(r1) if norm else None
    args = {
        "h_ptr": h, "f_ptr": f, "w_branch_ptr": w_branch, "w_next_ptr": w_next,
        "h_new_ptr": h_new, "n_ptr": n, "r1_ptr": r1, "r2_ptr": r2, "scale": scale, "eps": eps,
    }  # fmt: skip
    config = config or _launch.forward_config(d)
    return (h_new, n, r1, r2), _launch.forward_launch(
        branch_sandwich_forward_kernel, args, h, config
    )


def backward_launch(
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
    config: LaunchConfig | None = None,
) -> tuple[list[Tensor | None], Launch]:
    """dh, df and the partial dw_branch, dw_next still to be filled, and their launch."""
    n_rows, d = f.shape
    config = config or _launch.backward_config(d, f.element_size(), gains=2)
    groups = _launch.programs(f, config)
    dh = torch.empty_like(f, dtype=h_dtype) if needs[0] else None
    df = torch.empty_like(f) if needs[1] else None
    partials = [f.new_empty(groups, d, dtype=torch.float32) if need else None for need in needs[2:]]
    args = {
        "dh_new_ptr": dh_new, "dn_ptr": dn, "h_ptr": h, "f_ptr": f, "w_branch_ptr": w_branch,
        "w_next_ptr": w_next, "r1_ptr": r1, "r2_ptr": r2, "dh_ptr": dh, "df_ptr": df,
        "dw_branch_ptr": partials[0], "dw_next_ptr": partials[1], "n_rows": n_rows,
        "scale": scale, "D": d,
    }  # fmt: skip
    kernels = (branch_sandwich_backward_kernel, branch_sandwich_backward_wide_kernel)
    return [dh, df, *partials], _launch.backward_launch(*kernels, args, groups, config)


def aot_launches(
    x: Tensor, w: Tensor | None, config: LaunchConfig | None = None
) -> dict[str, Launch]:
    """Every launch on rows like x and gains like w (meta tensors), by name."""
    (_, _, r1, r2), forward = forward_launch(x, x, w, w, 1.0, 1e-6, True, config)
    assert r1 is not None
    needs = [True, True, w is not None, w is not None]
    _, backward = backward_launch(x, x, x, x, w, w, r1, r2, 1.0, x.dtype, needs, config)
    return {"branch_sandwich forward": forward, "branch_sandwich backward": backward}
