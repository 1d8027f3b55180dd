"""The Triton kernels of linear_update, forward and backward, and their launches.

The formulas that these letters belong to are in the docstring of kernels/linear_update.py.
"""

from __future__ import annotations

from typing import NamedTuple

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


@jit(do_not_specialize=["n_rows", "a", "b", "c", "g", "e", "q", "u", "v", "eps"])
def linear_update_forward_kernel(
    h_ptr, f_ptr, local_ptr, glob_ptr, w_next_ptr, h_new_ptr, local_new_ptr, glob_new_ptr,
    n_ptr, r_ptr, n_rows, a, b, c, g, e, q, u, v, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers. EARLY stores a memory before the next input is read.

    That waits for memory up to three times instead of once, and fewer rows are
    alive at the same time.
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
    b_h = b_local * u
    if glob_ptr is not None or glob_new_ptr is not None:
        b_glob = b_f * e + b_local * q
        if glob_ptr is not None:
            b_glob += load(glob_ptr + base, o, m) * g
        if EARLY and glob_new_ptr is not None:
            store(glob_new_ptr + base, o, b_glob, m)
        b_h += b_glob * v
    b_h += load(h_ptr + base, o, m) * a
    if not EARLY:
        if glob_new_ptr is not None:
            store(glob_new_ptr + base, o, b_glob, m)
        if local_new_ptr is not None:
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
def _read_norm(dn_ptr, h_new_ptr, base, o, m, b_w):
    """h', dn and dn * w_next of one tile."""
    b_h = load(h_new_ptr + base, o, m)
    b_dn = load(dn_ptr + base, o, m)
    return b_h, b_dn, b_dn * b_w


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
def linear_update_backward_kernel(
    dh_new_ptr, dlocal_new_ptr, dglob_new_ptr, dn_ptr, h_new_ptr, w_next_ptr, r_ptr, dh_ptr,
    df_ptr, dlocal_ptr, dglob_ptr, dw_next_ptr, n_rows, a, b, c, g, e, q, u, v,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GLOBAL: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers, read once."""
    b_w = gain_tile(w_next_ptr, D, BLOCK, ROWS)
    b_dw_next = tl.zeros((ROWS, BLOCK), tl.float32)
    n_blocks, step = tl.cdiv(n_rows, ROWS), tl.num_programs(0)
    for block in tl.range(tl.program_id(0), n_blocks, step, num_stages=STAGES):
        first = tl.cast(block, tl.int64) * ROWS
        o, _, m, o_row, m_row = tile(n_rows - first, D, BLOCK, ROWS)
        base = first * D
        b_total, b_dlocal, b_dglob = _read_rest(
            dh_new_ptr, dlocal_new_ptr, dglob_new_ptr, base, o, m
        )
        if dn_ptr is not None:
            b_r = load(r_ptr + first, o_row, m_row)[:, None]
            b_h, b_dn, b_dnw = _read_norm(dn_ptr, h_new_ptr, base, o, m, b_w)
            b_mean = tl.sum(b_dnw * b_h, axis=1)[:, None] * b_r / D
            b_y = b_h * b_r
            b_total += b_r * (b_dnw - b_y * b_mean)
            b_dw_next += b_dn * b_y
        _write(
            dh_ptr, df_ptr, dlocal_ptr, dglob_ptr, base, o, m, a, b, c, g, e, q, u, v,
            b_total, b_dlocal, b_dglob, GLOBAL,
        )  # fmt: skip
    store_sum(dw_next_ptr, b_dw_next, D, BLOCK)


@jit(do_not_specialize=["n_rows", "n_chunks", "a", "b", "c", "g", "e", "q", "u", "v"])
def linear_update_backward_wide_kernel(
    dh_new_ptr, dlocal_new_ptr, dglob_new_ptr, dn_ptr, h_new_ptr, w_next_ptr, r_ptr, dh_ptr,
    df_ptr, dlocal_ptr, dglob_ptr, dw_next_ptr, n_rows, n_chunks, a, b, c, g, e, q, u, v,
    D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, SPLITS: tl.constexpr,
    GLOBAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A row in chunks; h' and dn are read twice, the second time from L1 or L2.

    SPLITS programs share a row: each sums all of it and writes its own CHUNKS.
    """
    group = tl.program_id(0) // SPLITS
    own = tl.program_id(0) % SPLITS * CHUNKS
    o_tile = tl.arange(0, BLOCK)
    b_zero = tl.zeros((BLOCK,), tl.float32)
    b_dw_next = (b_zero,) * CHUNKS
    for row in range(group, n_rows, tl.num_programs(0) // SPLITS):
        base = tl.cast(row, tl.int64) * D
        if dn_ptr is not None:
            b_r = tl.load(r_ptr + row)
            b_sum = b_zero
            # As in post_sandwich: two chunks in flight, a bound known at run time only.
            for pair in tl.range(0, n_chunks, 2, num_stages=STAGES):
                for half in tl.static_range(2):
                    o = (pair + half) * BLOCK + o_tile
                    b_w = load_or_one(w_next_ptr, o, o < D)
                    b_h, b_dn, b_dnw = _read_norm(dn_ptr, h_new_ptr, base, o, o < D, b_w)
                    b_sum += b_dnw * b_h
            b_mean = tl.sum(b_sum) * b_r / D
        b_next = b_dw_next[:0]
        for chunk in tl.static_range(CHUNKS):
            o = (own + chunk) * BLOCK + o_tile
            b_total, b_dlocal, b_dglob = _read_rest(
                dh_new_ptr, dlocal_new_ptr, dglob_new_ptr, base, o, o < D
            )
            b_dw = b_zero
            if dn_ptr is not None:
                b_w = load_or_one(w_next_ptr, o, o < D)
                b_h, b_dn, b_dnw = _read_norm(dn_ptr, h_new_ptr, base, o, o < D, b_w)
                b_y = b_h * b_r
                b_total += b_r * (b_dnw - b_y * b_mean)
                b_dw = b_dn * b_y
            b_next += (b_dw_next[chunk] + b_dw,)
            _write(
                dh_ptr, df_ptr, dlocal_ptr, dglob_ptr, base, o, o < D, a, b, c, g, e, q, u, v,
                b_total, b_dlocal, b_dglob, GLOBAL,
            )  # fmt: skip
        b_dw_next = b_next
    store_chunks(dw_next_ptr, b_dw_next, group, own, D, BLOCK, CHUNKS)


# ---------------------------------------------------------------------------
# Launches


class Outputs(NamedTuple):
    """Outputs that a forward launch fills."""

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
    config: LaunchConfig | None = None,
) -> tuple[Outputs, Launch]:
    """Outputs still to be filled, and the launch that fills them; inputs are [rows, d]."""
    n_rows, d = h.shape
    config = config or _launch.forward_config(d)
    r = h.new_empty(n_rows, dtype=torch.float32) if norm else None
    n = torch.empty_like(f) if norm else None
    out = Outputs(torch.empty_like(h), _like(h, local_dtype), _like(h, glob_dtype), n, r)
    args = {
        "h_ptr": h, "f_ptr": f, "local_ptr": local, "glob_ptr": glob, "w_next_ptr": w_next,
        "h_new_ptr": out.h, "local_new_ptr": out.local, "glob_new_ptr": out.glob,
        "n_ptr": out.n, "r_ptr": out.r, **k._asdict(), "eps": eps, "EARLY": config.block > 8192,
    }  # fmt: skip
    return out, _launch.forward_launch(linear_update_forward_kernel, args, h, config)


def backward_launch(
    gradients: tuple[Tensor | None, ...],
    h_new: Tensor | None,
    w_next: Tensor | None,
    r: Tensor | None,
    k: Coefficients,
    has_glob: bool,
    dtypes: tuple[torch.dtype | None, ...],
    need_next: bool,
    config: LaunchConfig | None = None,
) -> tuple[list[Tensor | None], Launch]:
    """dh, df, dL, dG (as dtypes say) and the partial dw_next still to be filled, and their launch.

    gradients are dh', dL', dG', dn.
    """
    dh_new, dlocal_new, dglob_new, dn = gradients
    given = [x for x in gradients if x is not None]
    n_rows, d = given[0].shape
    itemsize = min(x.element_size() for x in given)
    # Memories take the registers of a second gain.
    memories = has_glob or dlocal_new is not None
    config = config or _launch.backward_config(d, itemsize, gains=1 + memories)
    groups = _launch.programs(given[0], config)
    dh, df, dlocal, dglob = (_like(given[0], dtype) for dtype in dtypes)
    partial = given[0].new_empty(groups, d, dtype=torch.float32) if need_next else None
    args = {
        "dh_new_ptr": dh_new, "dlocal_new_ptr": dlocal_new, "dglob_new_ptr": dglob_new,
        "dn_ptr": dn, "h_new_ptr": h_new, "w_next_ptr": w_next, "r_ptr": r, "dh_ptr": dh,
        "df_ptr": df, "dlocal_ptr": dlocal, "dglob_ptr": dglob, "dw_next_ptr": partial,
        "n_rows": n_rows, **k._asdict(), "D": d, "GLOBAL": has_glob,
    }  # fmt: skip
    kernels = (linear_update_backward_kernel, linear_update_backward_wide_kernel)
    results = [dh, df, dlocal, dglob, partial]
    return results, _launch.backward_launch(*kernels, args, groups, config)


def aot_launches(
    name: str,
    x: Tensor,
    w: Tensor | None,
    local: Tensor | None = None,
    glob: Tensor | None = None,
    two: bool = False,
    config: LaunchConfig | None = None,
) -> dict[str, Launch]:
    """The launches of an op on rows like x, memories and gains (meta tensors), by name."""
    k = Coefficients(b=0.5, g=0.5, e=0.5, q=0.5, v=0.5)
    local_dtype = None if local is None else local.dtype
    glob_dtype = glob.dtype if two and glob is not None else None
    out, forward = forward_launch(
        x, x, local, glob, w, k, 1e-6, local_dtype, glob_dtype, True, config
    )
    given = (x, local, glob if two else None, x)
    dtypes = (x.dtype, x.dtype, local_dtype, None if glob is None else glob.dtype)
    _, backward = backward_launch(
        given, x, w, out.r, k, glob is not None, dtypes, w is not None, config
    )
    return {f"{name} forward": forward, f"{name} backward": backward}
