"""Triton functions that the row kernels share: tiles, loads, stores, sums."""

from __future__ import annotations

from .._launch import jit, tl


@jit()
def load(ptr, o, m):
    """A tile in float32; lanes outside the mask read 0."""
    return tl.load(ptr + o, mask=m, other=0.0).to(tl.float32)


@jit()
def load_or_zero(ptr, base, o, m):
    """`load`, or zeros where there is no tensor."""
    b_x = tl.zeros_like(o).to(tl.float32)
    if ptr is not None:
        b_x = load(ptr + base, o, m)
    return b_x


@jit()
def load_or_one(ptr, o, m):
    """`load`, or ones where there is no gain."""
    b_w = tl.zeros_like(o).to(tl.float32) + 1.0
    if ptr is not None:
        b_w = load(ptr, o, m)
    return b_w


@jit()
def gain_tile(ptr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """A gain beside each row of a tile, or ones: read once, before the loop over the rows."""
    o = tl.arange(0, ROWS)[:, None] * 0 + tl.arange(0, BLOCK)[None, :]
    return load_or_one(ptr, o, o < D)


@jit()
def store(ptr, o, value, m):
    """A tile, rounded to what ptr points at."""
    tl.store(ptr + o, value.to(ptr.dtype.element_ty), mask=m)


@jit()
def tile(left, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Offsets and masks of a [ROWS, BLOCK] tile of whole rows, `left` of them in range.

    The offsets count from the tile's first value, so 32 bits do: the caller adds
    its 64-bit base, for rows * d passes 2^31 on real batches. Gains get offsets
    of the tile's own shape: read as a single row, a gain would get a layout of
    its own and a trip through shared memory; the repeated reads hit L1.
    """
    o_row = tl.arange(0, ROWS)
    o_col = tl.arange(0, BLOCK)
    m_row = o_row < left
    o = o_row[:, None] * D + o_col[None, :]
    o_gain = o_row[:, None] * 0 + o_col[None, :]
    m = m_row[:, None] & (o_col < D)[None, :]
    return o, o_gain, m, o_row, m_row


@jit()
def rsqrt_mean(b_x, D: tl.constexpr, eps):
    """1 / sqrt(mean(x^2) + eps) for each row of a tile."""
    return 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / D + eps)


@jit()
def store_sum(ptr, b_sum, D: tl.constexpr, BLOCK: tl.constexpr):
    """A program's share of a gain's gradient, from a tile that holds it row by row."""
    if ptr is not None:
        o_col = tl.arange(0, BLOCK)
        o = tl.program_id(0) * D + o_col
        tl.store(ptr + o, tl.sum(b_sum, axis=0), mask=o_col < D)


@jit()
def store_chunks(
    ptr, b_chunks, group, first, D: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr
):
    """A program's share of a gain's gradient, from CHUNKS chunks of the row, `first` on."""
    if ptr is not None:
        for chunk in tl.static_range(CHUNKS):
            o_col = (first + chunk) * BLOCK + tl.arange(0, BLOCK)
            tl.store(ptr + group * D + o_col, b_chunks[chunk], mask=o_col < D)
