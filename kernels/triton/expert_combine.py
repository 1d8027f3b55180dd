"""The Triton kernels of expert_combine, forward and backward, and their launches.

The formulas that these letters belong to are in the docstring of kernels/expert_combine.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _launch
from .._launch import Launch, LaunchConfig, jit, tl
from .tiles import load, load_or_zero, rsqrt_mean, store, store_chunks, store_sum, tile

ZEROED = LaunchConfig(1024, 32, 4)  # rows of routed whose marks one program looks at


@jit()
def _slot(slots_ptr, weights_ptr, o_slot, m_row):
    """Row number and weight of one slot, and whether it was kept."""
    b_slot = tl.load(slots_ptr + o_slot, mask=m_row, other=-1).to(tl.int64)
    m_slot = b_slot >= 0
    return b_slot, tl.load(weights_ptr + o_slot, mask=m_slot, other=0.0), m_slot


@jit()
def _combine(
    routed_ptr, slots_ptr, weights_ptr, shared_ptr, base, o, o_col, m, o_slot, m_row,
    D: tl.constexpr, K: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y of one tile; o_slot says where the first slot of each row is."""
    b_y = load_or_zero(shared_ptr, base, o, m)
    for j in tl.range(0, K, loop_unroll_factor=UNROLL):
        b_slot, b_weight, m_slot = _slot(slots_ptr, weights_ptr, o_slot + j, m_row)
        b_y += b_weight * load(routed_ptr, b_slot * D + o_col, m & m_slot)
    return b_y


@jit()
def _normed(
    routed_ptr, slots_ptr, weights_ptr, shared_ptr, base, o, o_col, m, o_slot, m_row, b_r1,
    D: tl.constexpr, K: tl.constexpr, COMBINE: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """y1 = y * r1 of one tile; zeros unless COMBINE."""
    b_y1 = tl.zeros_like(o).to(tl.float32)
    if COMBINE:
        b_y1 = b_r1 * _combine(
            routed_ptr, slots_ptr, weights_ptr, shared_ptr, base, o, o_col, m, o_slot, m_row,
            D, K, UNROLL,
        )  # fmt: skip
    return b_y1


@jit(do_not_specialize=["n_rows", "scale", "eps"])
def expert_combine_forward_kernel(
    h_ptr, routed_ptr, slots_ptr, weights_ptr, shared_ptr, w_branch_ptr, w_next_ptr, h_new_ptr,
    n_ptr, r1_ptr, r2_ptr, n_rows, scale, eps,
    D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    o, o_gain, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
    base = first * D
    o_slot = first * K + o_row[:, None] * K
    b_y = _combine(
        routed_ptr, slots_ptr, weights_ptr, shared_ptr, base, o, o_gain, m, o_slot,
        m_row[:, None], D, K, 1,
    )  # fmt: skip
    b_r1 = rsqrt_mean(b_y, D, eps)
    tl.store(r1_ptr + first + o_row, b_r1, mask=m_row)
    b_y *= (b_r1 * scale)[:, None]
    if w_branch_ptr is not None:
        b_y *= load(w_branch_ptr, o_gain, m)
    b_h = load(h_ptr + base, o, m) + b_y
    store(h_new_ptr + base, o, b_h, m)
    if n_ptr is not None:
        b_r2 = rsqrt_mean(b_h, D, eps)
        tl.store(r2_ptr + first + o_row, b_r2, mask=m_row)
        b_n = b_h * b_r2[:, None]
        if w_next_ptr is not None:
            b_n *= load(w_next_ptr, o_gain, m)
        store(n_ptr + base, o, b_n, m)


@jit()
def _read(dh_new_ptr, dn_ptr, h_ptr, w_next_ptr, base, o, o_col, m):
    """dh', dn, dn * w_next and h of one tile; zeros in the place of what is missing."""
    b_dh = load_or_zero(dh_new_ptr, base, o, m)
    b_dn = load_or_zero(dn_ptr, base, o, m)
    b_dnw = b_dn
    if w_next_ptr is not None:
        b_dnw = b_dn * load(w_next_ptr, o_col, m)
    return b_dh, b_dn, b_dnw, load_or_zero(h_ptr, base, o, m)


@jit()
def _gained(b_x, w_ptr, o_col, m):
    """x * w, or x where there is no gain."""
    if w_ptr is not None:
        b_x = b_x * load(w_ptr, o_col, m)
    return b_x


@jit()
def _spread(
    routed_ptr, slots_ptr, weights_ptr, drouted_ptr, dweights_ptr, used_ptr, o_col, m, o_slot,
    m_row, b_dy, b_dweights, o_k, D: tl.constexpr, K: tl.constexpr, AXIS: tl.constexpr,
    UNROLL: tl.constexpr,
):  # fmt: skip
    """Store one tile of the rows of drouted; return dweights with the tile's share added."""
    for j in tl.range(0, K, loop_unroll_factor=UNROLL):
        b_slot, b_weight, m_slot = _slot(slots_ptr, weights_ptr, o_slot + j, m_row)
        o = b_slot * D + o_col
        if dweights_ptr is not None:
            b_one = tl.sum(b_dy * load(routed_ptr, o, m & m_slot), axis=AXIS, keep_dims=AXIS == 1)
            b_dweights += tl.where(o_k == j, b_one, 0.0)
        if drouted_ptr is not None:
            store(drouted_ptr, o, b_dy * b_weight, m & m_slot)
            tl.store(used_ptr + b_slot, 1, mask=m_slot)
    return b_dweights


@jit(do_not_specialize=["n_rows", "scale"])
def expert_combine_backward_kernel(
    dh_new_ptr, dn_ptr, routed_ptr, slots_ptr, weights_ptr, shared_ptr, w_branch_ptr, w_next_ptr,
    h_ptr, r1_ptr, r2_ptr, dh_ptr, drouted_ptr, dweights_ptr, dshared_ptr, dw_branch_ptr,
    dw_next_ptr, used_ptr, n_rows, scale,
    D: tl.constexpr, K: tl.constexpr, BRANCH: tl.constexpr, COMBINE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers. BRANCH: the branch wants a gradient; COMBINE: y is needed."""
    # A loop around another one is not pipelined.
    UNROLL: tl.constexpr = K if STAGES > 1 else 1
    b_dw_branch = tl.zeros((ROWS, BLOCK), tl.float32)
    b_dw_next = tl.zeros((ROWS, BLOCK), tl.float32)
    n_blocks, step = tl.cdiv(n_rows, ROWS), tl.num_programs(0)
    for block in tl.range(tl.program_id(0), n_blocks, step, num_stages=STAGES):
        first = tl.cast(block, tl.int64) * ROWS
        o, o_gain, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
        base = first * D
        o_slot = first * K + o_row[:, None] * K
        b_total, b_dn, b_dnw, b_h = _read(dh_new_ptr, dn_ptr, h_ptr, w_next_ptr, base, o, o_gain, m)
        b_r1 = load(r1_ptr + first, o_row, m_row)[:, None]
        b_y1 = _normed(
            routed_ptr, slots_ptr, weights_ptr, shared_ptr, base, o, o_gain, m, o_slot,
            m_row[:, None], b_r1, D, K, COMBINE, UNROLL,
        )  # fmt: skip
        if dn_ptr is not None:
            b_r2 = load(r2_ptr + first, o_row, m_row)[:, None]
            b_y2 = b_r2 * (b_h + scale * _gained(b_y1, w_branch_ptr, o_gain, m))
            b_dw_next += b_dn * b_y2
            b_mean_2 = tl.sum(b_dnw * b_y2, axis=1)[:, None] / D
            b_total += b_r2 * (b_dnw - b_y2 * b_mean_2)
        if dh_ptr is not None:
            store(dh_ptr + base, o, b_total, m)
        if BRANCH:
            b_total *= scale
            b_dw_branch += b_total * b_y1
            b_total = _gained(b_total, w_branch_ptr, o_gain, m)
            b_mean_1 = tl.sum(b_total * b_y1, axis=1)[:, None] / D
            b_dy = b_r1 * (b_total - b_y1 * b_mean_1)
            if dshared_ptr is not None:
                store(dshared_ptr + base, o, b_dy, m)
            o_k = tl.arange(0, BLOCK_K)[None, :]
            b_dweights = _spread(
                routed_ptr, slots_ptr, weights_ptr, drouted_ptr, dweights_ptr, used_ptr,
                o_gain, m, o_slot, m_row[:, None], b_dy,
                tl.zeros((ROWS, BLOCK_K), tl.float32), o_k, D, K, 1, UNROLL,
            )  # fmt: skip
            if dweights_ptr is not None:
                m_k = m_row[:, None] & (o_k < K)
                tl.store(dweights_ptr + o_slot + o_k, b_dweights, mask=m_k)
    store_sum(dw_branch_ptr, b_dw_branch, D, BLOCK)
    store_sum(dw_next_ptr, b_dw_next, D, BLOCK)


@jit()
def _row_sums(
    dh_new_ptr, dn_ptr, routed_ptr, slots_ptr, weights_ptr, shared_ptr, w_branch_ptr, w_next_ptr,
    h_ptr, r1_ptr, r2_ptr, row, base, o_slot, m_row, n_chunks, scale,
    D: tl.constexpr, K: tl.constexpr, COMBINE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """r1, r2, m1 and m2, from one sweep over a row: three sums are enough, for T is linear in m2.

    m2 = sum(dn * w_next * y2) / d
    m1 = scale / d * (sum(y1 * w_branch * (dh' + r2 * dn * w_next))
                      - r2 * m2 * sum(y1 * w_branch * y2))

    Sums are of normed values: where a mean square overflows they are 0, not infinite.
    """
    b_r1 = tl.load(r1_ptr + row)
    b_r2 = 0.0
    if dn_ptr is not None:
        b_r2 = tl.load(r2_ptr + row)
    b_sum_1 = tl.zeros((BLOCK,), tl.float32)
    b_sum_2 = tl.zeros((BLOCK,), tl.float32)
    b_sum_3 = tl.zeros((BLOCK,), tl.float32)
    for chunk in range(n_chunks):
        o = chunk * BLOCK + tl.arange(0, BLOCK)
        m = o < D
        b_dh, _, b_dnw, b_h = _read(dh_new_ptr, dn_ptr, h_ptr, w_next_ptr, base, o, o, m)
        b_y1 = _normed(
            routed_ptr, slots_ptr, weights_ptr, shared_ptr, base, o, o, m, o_slot, m_row, b_r1,
            D, K, COMBINE, 1,
        )  # fmt: skip
        b_y1 = _gained(b_y1, w_branch_ptr, o, m)
        b_y2 = (b_h + scale * b_y1) * b_r2
        b_sum_1 += b_dnw * b_y2
        b_sum_2 += b_y1 * (b_dh + b_r2 * b_dnw)
        b_sum_3 += b_y1 * b_y2
    b_mean_2 = tl.sum(b_sum_1) / D
    b_mean_1 = tl.sum(b_sum_2) - b_r2 * b_mean_2 * tl.sum(b_sum_3)
    return b_r1, b_r2, b_mean_1 * scale / D, b_mean_2


@jit(do_not_specialize=["n_rows", "n_chunks", "scale"])
def expert_combine_backward_wide_kernel(
    dh_new_ptr, dn_ptr, routed_ptr, slots_ptr, weights_ptr, shared_ptr, w_branch_ptr, w_next_ptr,
    h_ptr, r1_ptr, r2_ptr, dh_ptr, drouted_ptr, dweights_ptr, dshared_ptr, dw_branch_ptr,
    dw_next_ptr, used_ptr, n_rows, n_chunks, scale,
    D: tl.constexpr, K: tl.constexpr, BRANCH: tl.constexpr, COMBINE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """A row in chunks; each of SPLITS programs sums all of it, and writes its own CHUNKS."""
    group = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    own = split * CHUNKS
    o_tile = tl.arange(0, BLOCK)
    o_k = tl.arange(0, BLOCK_K)
    b_zero = tl.zeros((BLOCK,), tl.float32)
    b_dw_branch = (b_zero,) * CHUNKS
    b_dw_next = (b_zero,) * CHUNKS
    for row in range(group, n_rows, tl.num_programs(0) // SPLITS):
        base = tl.cast(row, tl.int64) * D
        o_slot = tl.cast(row, tl.int64) * K
        m_row = row < n_rows
        b_r1, b_r2, b_mean_1, b_mean_2 = _row_sums(
            dh_new_ptr, dn_ptr, routed_ptr, slots_ptr, weights_ptr, shared_ptr, w_branch_ptr,
            w_next_ptr, h_ptr, r1_ptr, r2_ptr, row, base, o_slot, m_row, n_chunks, scale,
            D, K, COMBINE, BLOCK,
        )  # fmt: skip
        b_dweights = tl.zeros((BLOCK_K,), tl.float32)
        # A tuple has no item assignment: the next pair is built up and swapped in.
        next_branch = b_dw_branch[:0]
        next_next = b_dw_next[:0]
        for chunk in tl.static_range(CHUNKS):
            o = (own + chunk) * BLOCK + o_tile
            m = o < D
            b_total, b_dn, b_dnw, b_h = _read(dh_new_ptr, dn_ptr, h_ptr, w_next_ptr, base, o, o, m)
            b_y1 = _normed(
                routed_ptr, slots_ptr, weights_ptr, shared_ptr, base, o, o, m, o_slot, m_row, b_r1,
                D, K, COMBINE, 1,
            )  # fmt: skip
            b_y2 = b_r2 * (b_h + scale * _gained(b_y1, w_branch_ptr, o, m))
            next_next += (b_dw_next[chunk] + b_dn * b_y2,)
            b_total += b_r2 * (b_dnw - b_y2 * b_mean_2)
            if dh_ptr is not None:
                store(dh_ptr + base, o, b_total, m)
            b_total *= scale
            next_branch += (b_dw_branch[chunk] + b_total * b_y1,)
            if BRANCH:
                b_total = _gained(b_total, w_branch_ptr, o, m)
                b_dy = b_r1 * (b_total - b_y1 * b_mean_1)
                if dshared_ptr is not None:
                    store(dshared_ptr + base, o, b_dy, m)
                b_dweights = _spread(
                    routed_ptr, slots_ptr, weights_ptr, drouted_ptr, dweights_ptr, used_ptr,
                    o, m, o_slot, m_row, b_dy, b_dweights, o_k, D, K, 0, 1,
                )  # fmt: skip
        b_dw_branch = next_branch
        b_dw_next = next_next
        if dweights_ptr is not None:
            o = (tl.cast(split, tl.int64) * n_rows + row) * K + o_k
            tl.store(dweights_ptr + o, b_dweights, mask=o_k < K)
    store_chunks(dw_branch_ptr, b_dw_branch, group, own, D, BLOCK, CHUNKS)
    store_chunks(dw_next_ptr, b_dw_next, group, own, D, BLOCK, CHUNKS)


@jit(do_not_specialize=["n_slots"])
def expert_combine_zero_kernel(
    used_ptr, drouted_ptr, n_slots, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Zeros for the rows of drouted that no slot names."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    for i in range(ROWS):
        used = tl.load(used_ptr + first + i, mask=first + i < n_slots, other=1)
        if used == 0:
            for start in range(0, D, BLOCK):
                o = start + tl.arange(0, BLOCK)
                b_zero = tl.zeros((BLOCK,), tl.float32)
                store(drouted_ptr + (first + i) * D, o, b_zero, o < D)


# ---------------------------------------------------------------------------
# Launches


def forward_launch(
    h: Tensor,
    routed: Tensor,
    slots: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    scale: float,
    eps: float,
    norm: bool,
    config: LaunchConfig | None = None,
) -> tuple[tuple[Tensor, Tensor | None, Tensor, Tensor | None], Launch]:
    """h', n, r1, r2 still to be filled, and the launch that fills them."""
    n_rows, d = h.shape
    h_new, r1 = torch.empty_like(h), h.new_empty(n_rows, dtype=torch.float32)
    n = torch.empty_like(h, dtype=routed.dtype) if norm else None
    r2 = torch.empty_like(r1) if norm else None
    args = {
        "h_ptr": h, "routed_ptr": routed, "slots_ptr": slots, "weights_ptr": weights,
        "shared_ptr": shared, "w_branch_ptr": w_branch, "w_next_ptr": w_next, "h_new_ptr": h_new,
        "n_ptr": n, "r1_ptr": r1, "r2_ptr": r2, "scale": scale, "eps": eps, "K": slots.shape[1],
    }  # fmt: skip
    config = config or _launch.forward_config(d)
    return (h_new, n, r1, r2), _launch.forward_launch(
        expert_combine_forward_kernel, args, h, config
    )


def _backward_config(d: int, itemsize: int) -> LaunchConfig:
    """As for two gains, but the slots' loop beside chunks of gain sums takes registers.

    More than half an SM's, so one program per SM; beside 8192 columns more than there are.
    """
    config = _launch.backward_config(d, itemsize, gains=2)
    if config.chunks == 1:
        return config
    splits = config.splits * (1 if config.chunks * config.block < 8192 * config.splits else 2)
    chunks = -(-d // (config.block * splits)) * splits
    return config._replace(splits=splits, chunks=chunks, per_sm=1)


def backward_launches(
    dh_new: Tensor | None,
    dn: Tensor | None,
    routed: Tensor,
    slots: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    h: Tensor | None,
    r1: Tensor,
    r2: Tensor | None,
    scale: float,
    h_dtype: torch.dtype,
    needs: list[bool],
    config: LaunchConfig | None = None,
) -> tuple[list[Tensor | None], list[Launch]]:
    """dh, drouted, dweights [splits, T, k], dshared and the gains' partial gradients."""
    n_rows, d, k = slots.shape[0], routed.shape[1], slots.shape[1]
    need_h, need_routed, need_weights, need_shared, need_branch, need_next = needs
    branch = need_routed or need_weights or need_shared or need_branch
    config = config or _backward_config(d, routed.element_size())
    groups = max(min(1, n_rows), _launch.programs(r1[:, None], config))
    dh = r1.new_empty(n_rows, d, dtype=h_dtype) if need_h else None
    drouted = torch.empty_like(routed) if need_routed else None
    used = torch.zeros_like(routed[:, 0], dtype=torch.uint8) if need_routed else None
    dweights = r1.new_empty(config.splits, n_rows, k) if need_weights else None
    dshared = torch.empty_like(shared) if need_shared and shared is not None else None
    partials = [r1.new_empty(groups, d) if need else None for need in (need_branch, need_next)]
    args = {
        "dh_new_ptr": dh_new, "dn_ptr": dn, "routed_ptr": routed, "slots_ptr": slots,
        "weights_ptr": weights, "shared_ptr": shared, "w_branch_ptr": w_branch,
        "w_next_ptr": w_next, "h_ptr": None if dn is None else h, "r1_ptr": r1,
        "r2_ptr": r2, "dh_ptr": dh, "drouted_ptr": drouted, "dweights_ptr": dweights,
        "dshared_ptr": dshared, "dw_branch_ptr": partials[0], "dw_next_ptr": partials[1],
        "used_ptr": used, "n_rows": n_rows, "scale": scale, "D": d, "K": k,
        "BRANCH": branch, "COMBINE": branch or dn is not None, "BLOCK_K": 1 << (k - 1).bit_length(),
    }  # fmt: skip
    kernels = (expert_combine_backward_kernel, expert_combine_backward_wide_kernel)
    launches = [_launch.backward_launch(*kernels, args, groups, config)]
    if drouted is not None:
        zero = {"used_ptr": used, "drouted_ptr": drouted, "n_slots": len(routed), "D": d}
        zero |= {"BLOCK": ZEROED.block, "ROWS": ZEROED.rows}
        grid = -(-len(routed) // ZEROED.rows)
        launches.append(Launch(expert_combine_zero_kernel, grid, zero, ZEROED))
    return [dh, drouted, dweights, dshared, *partials], launches


def aot_launches(x: Tensor, w: Tensor, config: LaunchConfig | None = None) -> dict[str, Launch]:
    """Every launch on rows like x and gains like w (meta tensors), by name."""
    k = 6
    routed, weights = x.new_empty(k * x.shape[0], x.shape[1]), w.new_empty(x.shape[0], k)
    slots = torch.empty_like(weights, dtype=torch.int32)
    inputs = (routed, slots, weights, x, w, w)
    (_, _, r1, r2), forward = forward_launch(x, *inputs, 1.0, 1e-6, True, config)
    args = (x, x, *inputs, x, r1, r2, 1.0, x.dtype, [True] * 6, config)
    backward, zero = backward_launches(*args)[1]
    return {"combine forward": forward, "combine backward": backward, "combine zero": zero}
