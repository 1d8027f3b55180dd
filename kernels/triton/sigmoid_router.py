"""The Triton kernels of sigmoid_router, forward and backward, and their launches.

The formulas that these letters belong to are in the docstring of kernels/sigmoid_router.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _launch
from .._launch import Launch, LaunchConfig, jit, tl


@jit()
def _dot(b_a, b_b, b_sum, PRECISION: tl.constexpr):
    """b_sum + b_a @ b_b in float32; b_a may be bfloat16, b_b is float32."""
    if b_a.dtype == tl.bfloat16 and PRECISION != "ieee":
        # b_b = the sum of its three parts, bit for bit; the small ones are added first.
        b_high = b_b.to(tl.bfloat16)
        b_rest = b_b - b_high.to(tl.float32)
        b_middle = b_rest.to(tl.bfloat16)
        b_low = (b_rest - b_middle.to(tl.float32)).to(tl.bfloat16)
        b_part = tl.dot(b_a, b_low)
        b_part = tl.dot(b_a, b_middle, b_part)
        b_part = tl.dot(b_a, b_high, b_part)
        # Tensor cores cut their sums short: over 4096 columns the logits came out 40
        # times less exact than a float32 product (H200). So each tile is added up by
        # ordinary float32; the move keeps the compiler from merging that sum back in.
        b_part = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [b_part], dtype=tl.float32, is_pure=True, pack=1
        )
        return b_sum + b_part
    return tl.dot(b_a.to(tl.float32), b_b, b_sum, input_precision=PRECISION)


@jit()
def _exp(b_x):
    """exp(x) of x <= 0 to one unit in the last place, subnormal results included.

    tl.exp is off by dozens of units where x is large. Here x = n ln 2 + r with
    |r| <= ln(2) / 2 and n ln 2 taken off in two steps, and a Taylor series in r.
    """
    b_x = tl.where(b_x < -104.0, -104.0, b_x)
    b_n = tl.floor(b_x * 1.4426950408889634 + 0.5)
    b_r = (b_x - b_n * 0.693359375) + b_n * 2.12194440054690581e-4
    b_sum = b_r * (1.0 / 5040.0) + 1.0 / 720.0
    b_sum = b_sum * b_r + 1.0 / 120.0
    b_sum = b_sum * b_r + 1.0 / 24.0
    b_sum = b_sum * b_r + 1.0 / 6.0
    b_sum = b_sum * b_r + 0.5
    b_sum = b_sum * b_r * b_r + b_r + 1.0
    # 2^n in two factors: one alone cannot reach the subnormals.
    b_power = b_n.to(tl.int32)
    b_half = b_power >> 1
    b_first = ((b_half + 127) << 23).to(tl.float32, bitcast=True)
    b_second = ((b_power - b_half + 127) << 23).to(tl.float32, bitcast=True)
    return b_sum * b_first * b_second


@jit()
def _sigmoid(b_x):
    """sigmoid(x), to a few units in the last place at both ends."""
    b_e = _exp(-tl.abs(b_x))
    return tl.div_rn(tl.where(b_x >= 0, 1.0, b_e), 1.0 + b_e)


@jit()
def _scaled_score(b_x, b_largest):
    """sigmoid(x) e^-largest, where largest is 0 or below and no less than x below 0."""
    return tl.div_rn(_exp(tl.where(b_x < 0, b_x, 0.0) - b_largest), 1.0 + _exp(-tl.abs(b_x)))


@jit()
def _logsumexp(b_logits, m_e):
    """logsumexp of each row over the experts in range, and the softmax."""
    b_max = tl.max(tl.where(m_e, b_logits, float("-inf")), axis=1)
    b_e = tl.where(m_e, _exp(b_logits - b_max[:, None]), 0.0)
    b_sum = tl.sum(b_e, axis=1)
    return b_max + tl.log(b_sum), tl.div_rn(b_e, b_sum[:, None])


@jit()
def _order(b_x, m_e, LOWEST: tl.constexpr):
    """int32 keys in the order of the floats; NaN on top, out of range at LOWEST."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_key = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    b_key = tl.where(b_x == b_x, b_key, 0x7FFFFFFF)
    return tl.where(m_e, b_key, LOWEST)


@jit(do_not_specialize=["n_rows"])
def sigmoid_router_forward_kernel(
    x_ptr, w_ptr, bias_ptr, logits_ptr, weights_ptr, indices_ptr, load_ptr, z_ptr, n_rows,
    D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    LOWEST: tl.constexpr = -0x80000000
    program = tl.program_id(0).to(tl.int64)
    first = program * ROWS
    o_row = tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    m_row = (o_row < n_rows - first)[:, None]
    m_e = (o_e < E)[None, :]
    b_logits = tl.zeros((ROWS, BLOCK_E), tl.float32)
    for start in range(0, D, BLOCK_D):
        o_d = start + tl.arange(0, BLOCK_D)
        m_d = o_d < D
        o_x = o_row[:, None] * D + o_d[None, :]
        b_x = tl.load(x_ptr + first * D + o_x, mask=m_row & m_d[None, :], other=0.0)
        o_w = o_e[:, None] * D + o_d[None, :]
        b_w = tl.load(w_ptr + o_w, mask=(o_e < E)[:, None] & m_d[None, :], other=0.0)
        b_logits = _dot(b_x, tl.trans(b_w), b_logits, PRECISION)
    if logits_ptr is not None:
        o = o_row[:, None] * E + o_e[None, :]
        tl.store(logits_ptr + first * E + o, b_logits, mask=m_row & m_e)
    b_lse, _ = _logsumexp(b_logits, m_e)
    b_lse = tl.where(o_row < n_rows - first, b_lse, 0.0)
    tl.store(z_ptr + program, tl.sum(b_lse * b_lse))

    b_biased = _sigmoid(b_logits)
    if bias_ptr is not None:
        b_biased += tl.load(bias_ptr + o_e, mask=o_e < E, other=0.0)[None, :]
    b_key = _order(b_biased, m_e, LOWEST)
    o_k = tl.arange(0, BLOCK_K)[None, :]
    b_picked = tl.full((ROWS, BLOCK_K), float("-inf"), tl.float32)
    b_indices = tl.zeros((ROWS, BLOCK_K), tl.int32)
    for slot in range(K):
        b_top = tl.max(b_key, axis=1)
        b_index = tl.min(tl.where(b_key == b_top[:, None], o_e[None, :], BLOCK_E), axis=1)
        m_top = o_e[None, :] == b_index[:, None]
        b_one = tl.sum(tl.where(m_top, b_logits, 0.0), axis=1)
        b_key = tl.where(m_top, LOWEST, b_key)
        b_picked = tl.where(o_k == slot, b_one[:, None], b_picked)
        b_indices = tl.where(o_k == slot, b_index[:, None], b_indices)
    b_largest = tl.minimum(tl.max(b_picked, axis=1), 0.0)[:, None]
    b_weights = _scaled_score(b_picked, b_largest)  # of no expert: 0
    b_sum = tl.sum(b_weights, axis=1)
    o = o_row[:, None] * K + o_k
    m = m_row & (o_k < K)
    tl.store(weights_ptr + first * K + o, tl.div_rn(b_weights, b_sum[:, None]), mask=m)
    tl.store(indices_ptr + first * K + o, b_indices, mask=m)
    b_load = tl.sum(((b_key == LOWEST) & m_row).to(tl.int32), axis=0)
    tl.store(load_ptr + program * E + o_e, b_load, mask=o_e < E)


@jit()
def _through_weights(dweights_ptr, indices_ptr, b_logits, o_row, o_e, m_row, K: tl.constexpr):
    """Compute the gradient of the logits through the combine weights."""
    b_dweights = tl.zeros_like(b_logits)
    m_chosen = tl.zeros(b_logits.shape, tl.int1)
    for slot in range(K):
        b_index = tl.load(indices_ptr + o_row * K + slot, mask=m_row, other=0)
        b_one = tl.load(dweights_ptr + o_row * K + slot, mask=m_row, other=0.0)
        m = o_e[None, :] == b_index[:, None]
        m_chosen = m_chosen | m
        b_dweights = tl.where(m, b_one[:, None], b_dweights)
    b_largest = tl.max(tl.where(m_chosen, b_logits, -3e38), axis=1)[:, None]
    b_largest = tl.minimum(b_largest, 0.0)
    b_weights = _scaled_score(tl.where(m_chosen, b_logits, b_largest), b_largest)
    b_sum = tl.sum(tl.where(m_chosen, b_weights, 0.0), axis=1)
    b_weights = tl.div_rn(b_weights, b_sum[:, None])
    b_shared = tl.sum(b_dweights * b_weights, axis=1)
    b_through = b_weights * (b_dweights - b_shared[:, None]) * _sigmoid(-b_logits)
    return tl.where(m_chosen, b_through, 0.0)


@jit(do_not_specialize=["n_rows", "per_row"])
def sigmoid_router_backward_kernel(
    dweights_ptr, dz_ptr, w_ptr, logits_ptr, indices_ptr, dlogits_ptr, dx_ptr, n_rows, per_row,
    D: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dlogits and dx; per_row is 2 / T."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    o_row = tl.arange(0, ROWS)
    o_e = tl.arange(0, BLOCK_E)
    m_row = o_row < n_rows - first
    m_e = (o_e < E)[None, :]
    o = o_row[:, None] * E + o_e[None, :]
    m = m_row[:, None] & m_e
    b_logits = tl.load(logits_ptr + first * E + o, mask=m, other=0.0)
    b_dlogits = tl.zeros_like(b_logits)
    if dweights_ptr is not None:
        b_dlogits += _through_weights(
            dweights_ptr + first * K, indices_ptr + first * K, b_logits, o_row, o_e, m_row, K
        )
    if dz_ptr is not None:
        b_lse, b_softmax = _logsumexp(b_logits, m_e)
        b_dlogits += b_softmax * (b_lse * (tl.load(dz_ptr) * per_row))[:, None]
    if dlogits_ptr is not None:
        tl.store(dlogits_ptr + first * E + o, b_dlogits, mask=m)
    if dx_ptr is not None:
        for start in range(0, D, BLOCK_D):
            o_d = start + tl.arange(0, BLOCK_D)
            o_w = o_e[:, None] * D + o_d[None, :]
            b_w = tl.load(w_ptr + o_w, mask=(o_e < E)[:, None] & (o_d < D)[None, :], other=0.0)
            b_dx = _dot(b_dlogits, b_w, tl.zeros((ROWS, BLOCK_D), tl.float32), PRECISION)
            o_x = o_row[:, None] * D + o_d[None, :]
            m_x = m_row[:, None] & (o_d < D)[None, :]
            tl.store(dx_ptr + first * D + o_x, b_dx.to(dx_ptr.dtype.element_ty), mask=m_x)


@jit(do_not_specialize=["n_rows"])
def sigmoid_router_dx_kernel(
    dlogits_ptr, w_ptr, dx_ptr, n_rows,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx if there are too many experts to keep a row of dlogits in registers."""
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    first = (tl.program_id(0) // TILES).to(tl.int64) * ROWS
    o_row = tl.arange(0, ROWS)
    m_row = (o_row < n_rows - first)[:, None]
    o_d = tl.program_id(0) % TILES * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = (o_d < D)[None, :]
    b_dx = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for start in range(0, E, BLOCK_E):
        o_e = start + tl.arange(0, BLOCK_E)
        o = o_row[:, None] * E + o_e[None, :]
        b_dl = tl.load(dlogits_ptr + first * E + o, mask=m_row & (o_e < E)[None, :], other=0.0)
        o_w = o_e[:, None] * D + o_d[None, :]
        b_w = tl.load(w_ptr + o_w, mask=(o_e < E)[:, None] & m_d, other=0.0)
        b_dx = _dot(b_dl, b_w, b_dx, PRECISION)
    o = o_row[:, None] * D + o_d[None, :]
    tl.store(dx_ptr + first * D + o, b_dx.to(dx_ptr.dtype.element_ty), mask=m_row & m_d)


@jit(do_not_specialize=["n_rows"])
def sigmoid_router_dw_kernel(
    dlogits_ptr, x_ptr, dw_ptr, n_rows,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dw over one share of the tokens, [shares, E, D] in all."""
    TILES_E: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    TILES: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D * TILES_E
    share = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    o_row = tl.arange(0, ROWS)
    o_e = tile % TILES_E * BLOCK_E + tl.arange(0, BLOCK_E)
    o_d = tile // TILES_E * BLOCK_D + tl.arange(0, BLOCK_D)
    m_e = (o_e < E)[None, :]
    # Transposed: x comes first, for _dot takes its bfloat16 as it is.
    b_dw = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    for block in range(share, tl.cdiv(n_rows, ROWS), tl.num_programs(0) // TILES):
        first = tl.cast(block, tl.int64) * ROWS
        m_row = (o_row < n_rows - first)[:, None]
        o = o_row[:, None] * E + o_e[None, :]
        b_dl = tl.load(dlogits_ptr + first * E + o, mask=m_row & m_e, other=0.0)
        o_x = o_row[:, None] * D + o_d[None, :]
        b_x = tl.load(x_ptr + first * D + o_x, mask=m_row & (o_d < D)[None, :], other=0.0)
        b_dw = _dot(tl.trans(b_x), b_dl, b_dw, PRECISION)
    o = tl.cast(share, tl.int64) * E * D + o_e[None, :] * D + o_d[:, None]
    tl.store(dw_ptr + o, b_dw, mask=m_e & (o_d < D)[:, None])


# ---------------------------------------------------------------------------
# Launches


# Keyed by the power of two that holds the experts: columns of x at a time, tokens
# and warps of a program. Fixed, so that ranks agree; chosen so that nothing spills.
_FORWARD = {
    16: LaunchConfig(64, 64, 4),
    32: LaunchConfig(64, 64, 4),
    64: LaunchConfig(64, 64, 4),
    128: LaunchConfig(32, 64, 8),
    256: LaunchConfig(32, 32, 8),
    512: LaunchConfig(16, 32, 16),
}
_DLOGITS = {
    16: LaunchConfig(64, 64, 4),
    32: LaunchConfig(64, 64, 4),
    64: LaunchConfig(64, 64, 8),
    128: LaunchConfig(32, 64, 8),
    256: LaunchConfig(1, 16, 8),
    512: LaunchConfig(1, 16, 8),
}
_DX = LaunchConfig(64, 64, 4)
_DX_EXPERTS = 32
_DW = {
    16: LaunchConfig(64, 64, 4, per_sm=2),
    32: LaunchConfig(64, 64, 4, per_sm=2),
    64: LaunchConfig(64, 64, 4, per_sm=2),
    128: LaunchConfig(64, 32, 4, per_sm=2),
}


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _tiles(experts: int) -> int:
    """A matrix unit takes no fewer than 16 columns."""
    return max(16, _power(experts))


def _precision() -> str:
    """Precision of float32 products; the interpreter supports true float32 only."""
    return "ieee" if _launch.interpreting() else "bf16x6"


def forward_launch(
    x: Tensor, w: Tensor, bias: Tensor | None, top_k: int, save: bool
) -> tuple[tuple[Tensor, ...], Launch]:
    """weights, indices, partial load, partial z and logits still to be filled."""
    (n_rows, d), experts = x.shape, w.shape[0]
    config = _FORWARD[_tiles(experts)]
    grid = -(-n_rows // config.rows)
    weights = w.new_empty(n_rows, top_k)
    indices = w.new_empty(n_rows, top_k, dtype=torch.int32)
    load = w.new_empty(grid, experts, dtype=torch.int32)
    z = w.new_empty(grid)
    logits = w.new_empty(n_rows if save else 0, experts)
    args = {
        "x_ptr": x, "w_ptr": w, "bias_ptr": bias, "logits_ptr": logits if save else None,
        "weights_ptr": weights,
        "indices_ptr": indices, "load_ptr": load, "z_ptr": z, "n_rows": n_rows, "D": d,
        "E": experts, "K": top_k, "BLOCK_D": config.block, "BLOCK_E": _tiles(experts),
        "BLOCK_K": _power(top_k), "ROWS": config.rows, "PRECISION": _precision(),
    }  # fmt: skip
    return (weights, indices, load, z, logits), Launch(
        sigmoid_router_forward_kernel, grid, args, config
    )


def backward_launches(
    dweights: Tensor | None,
    dz: Tensor | None,
    x: Tensor,
    w: Tensor,
    logits: Tensor,
    indices: Tensor,
    needs: list[bool],
) -> tuple[list[Tensor | None], list[Launch]]:
    """dx and the shares' partial dw still to be filled, and the launches in order."""
    (n_rows, d), experts = x.shape, w.shape[0]
    tiles = _tiles(experts)
    config = _DLOGITS[tiles]
    fused = config.block > 1
    dx = torch.empty_like(x) if needs[0] else None
    dlogits = torch.empty_like(logits) if needs[1] or not fused else None
    args = {
        "dweights_ptr": dweights, "dz_ptr": dz, "w_ptr": w, "logits_ptr": logits,
        "indices_ptr": indices, "dlogits_ptr": dlogits, "dx_ptr": dx if fused else None,
        "n_rows": n_rows, "per_row": 2.0 / max(1, n_rows), "D": d, "E": experts,
        "K": indices.shape[1], "BLOCK_D": config.block, "BLOCK_E": tiles, "ROWS": config.rows,
        "PRECISION": _precision(),
    }  # fmt: skip
    launches = [Launch(sigmoid_router_backward_kernel, -(-n_rows // config.rows), args, config)]
    dw = None
    if dlogits is not None and dx is not None and not fused:
        launches.append(_dx_launch(dlogits, w, dx))
    if dlogits is not None and needs[1]:
        dw, launch = _dw_launch(dlogits, x)
        launches.append(launch)
    return [dx, dw], launches


def _dx_launch(dlogits: Tensor, w: Tensor, dx: Tensor) -> Launch:
    """dx = dlogits @ w, as one more kernel."""
    (n_rows, d), experts, config = dx.shape, w.shape[0], _DX
    args = {
        "dlogits_ptr": dlogits, "w_ptr": w, "dx_ptr": dx, "n_rows": n_rows, "D": d, "E": experts,
        "BLOCK_D": config.block, "BLOCK_E": _DX_EXPERTS, "ROWS": config.rows,
        "PRECISION": _precision(),
    }  # fmt: skip
    return Launch(
        sigmoid_router_dx_kernel, -(-n_rows // config.rows) * -(-d // config.block), args, config
    )


def _dw_launch(dlogits: Tensor, x: Tensor) -> tuple[Tensor, Launch]:
    """The shares' partial dw [shares, E, d] still to be filled, and their launch."""
    (n_rows, d), experts = x.shape, dlogits.shape[1]
    block = min(max(_DW), _tiles(experts))
    config = _DW[block]
    tiles = -(-d // config.block) * -(-experts // block)
    shares = max(min(1, n_rows), _launch.programs(x, config._replace(splits=tiles)))
    dw = dlogits.new_empty(shares, experts, d)
    args = {
        "dlogits_ptr": dlogits, "x_ptr": x, "dw_ptr": dw, "n_rows": n_rows, "D": d, "E": experts,
        "BLOCK_D": config.block, "BLOCK_E": block, "ROWS": config.rows,
        "PRECISION": _precision(),
    }  # fmt: skip
    return dw, Launch(sigmoid_router_dw_kernel, tiles * shares, args, config)


def aot_launches(x: Tensor, w: Tensor) -> dict[str, Launch]:
    """Every launch on rows like x (meta tensors) for few and many experts, by name."""
    launches = {}
    for experts, top_k in ((30, 6), (256, 8)):
        gates, bias = w.new_empty(experts, x.shape[1]), w.new_empty(experts)
        (weights, indices, _, _, logits), launch = forward_launch(x, gates, bias, top_k, True)
        args = (weights, w.new_empty(()), x, gates, logits, indices, [True] * 2)
        for each in (launch, *backward_launches(*args)[1]):
            kernel = each.kernel.__name__.removesuffix("_kernel").removeprefix("_")
            launches[f"router/{experts} {kernel}"] = each
    return launches
