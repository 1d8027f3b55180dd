"""Run the routed experts: E SwiGLUs over rows grouped by expert.

Row r of the S = N k grouped rows belongs to token t(r) and expert e(r); the rows of
expert e are those from ends[e-1] to ends[e]. Forward, per row:

    a    = gate_up[e] @ x[t]         [gate; up] = a
    s    = silu(gate) * up
    row  = down[e] @ s

Backward, from drow:

    ds   = down[e]^T @ drow                    ddown[e]    = sum over rows of drow s^T
    dup  = ds * silu(gate)                     dgate_up[e] = sum over rows of da x[t]^T
    dgate= ds * up * silu'(gate)               dx[t] = sum over its k rows of gate_up[e]^T da

Shapes: x [N, d], gate_up [E, 2f, d] and down [E, d, f] (out before in, as nn.Linear:
the bfloat16 GEMMs of a CPU take up to eight times longer the other way round, and
F.grouped_mm accepts either), token [S] and inverse [N, k] int32, each the other's
inverse: token[inverse[t, j]] = t; ends [E] int32, the last is S; rows [S, d].
Dtypes: rows and dx as x, each weight's gradient as that weight, which may be wider
than x: the weights are cast to x's dtype inside the op, as autocast would, and again
in the backward, so that the copies of one loop do not live until its backward. dx is
added up in float32 and rounded once, by the inverse permutation: no atomics, the same
bits every run.

Saved are x, a and the indices; the gathered rows of x and s are made again.

One op holds it all, because F.grouped_mm neither follows autocast nor compiles in
float32, and because its rows past the last end are never written: here ends[-1] is S
and no group is padded. On CUDA nothing waits for the host in bfloat16 from sm_90 on;
in float32, and before sm_90, F.grouped_mm itself is a loop that reads `ends` back. On
a CPU it is that loop as well, so there the op goes expert by expert itself and an
expert's rows stay in cache between its GEMMs; in bfloat16 without hardware for it the
products are float32, of the unrounded weights. Speed on a GPU: not yet measured.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.kernels._aten import no_autocast, packed
from deeploop.kernels._checks import check_reverse_mode
from deeploop.kernels._op import Saved, define, fake_gradients
from deeploop.utils.device import computes_in_bf16
from deeploop.utils.errors import InputError


def grouped_mm(
    x: Tensor, gate_up: Tensor, down: Tensor, token: Tensor, inverse: Tensor, ends: Tensor
) -> Tensor:
    """Compute every expert's output rows, [S, d]; shapes are in the module's docstring."""
    check_strides(x.shape[1], down.shape[2], x.dtype, x.device)
    check_reverse_mode("grouped_mm", x, gate_up, down)
    save = torch.is_grad_enabled() and any(t.requires_grad for t in (x, gate_up, down))
    return _forward(x, gate_up, down, token, inverse, ends, save)[0]


def reference(
    x: Tensor, gate_up: Tensor, down: Tensor, token: Tensor, inverse: Tensor, ends: Tensor
) -> Tensor:
    """Run the experts one by one in plain PyTorch: the specification of `grouped_mm`."""
    begin, outputs = 0, []
    for end, w_in, w_out in zip(ends.tolist(), gate_up.unbind(0), down.unbind(0), strict=True):
        chosen = x.index_select(0, token[begin:end])
        gate, up = F.linear(chosen, w_in.to(x.dtype)).chunk(2, dim=-1)
        outputs.append(F.linear(F.silu(gate) * up, w_out.to(x.dtype)))
        begin = end
    return torch.cat(outputs)


def check_strides(d_model: int, d_expert: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse widths whose rows F.grouped_mm cannot address: 16-byte strides."""
    if dtype == torch.float64 or (device.type != "cuda" and dtype.itemsize != 2):
        return
    step = 16 // dtype.itemsize
    for name, width in (("d_expert", d_expert), ("d_model", d_model)):
        if width % step:
            raise InputError(
                f"{name}={width}: grouped GEMMs in {str(dtype).removeprefix('torch.')} need a "
                f"multiple of {step}; use {width + -width % step}, or the backend 'reference'"
            )


# ---------------------------------------------------------------------------
# SwiGLU on [rows, 2f]


def _swiglu(a: Tensor) -> Tensor:
    gate, up = a.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _swiglu_backward(a: Tensor, ds: Tensor) -> tuple[Tensor, Tensor]:
    """Compute da and s; overwrites ds."""
    gate, up = a.chunk(2, dim=-1)
    da = torch.empty_like(a)
    dgate, dup = da.chunk(2, dim=-1)
    s = F.silu(gate)
    torch.mul(ds, s, out=dup)
    torch.ops.aten.silu_backward.grad_input(ds.mul_(up), gate, grad_input=dgate)
    return da, s.mul_(up)


# ---------------------------------------------------------------------------
# All experts in one GEMM: CUDA


def _one_gemm(x: Tensor) -> bool:
    """True if F.grouped_mm runs all experts in one GEMM, False for one GEMM after another."""
    return x.is_cuda and x.dtype != torch.float64


def _forward_grouped(
    x: Tensor, gate_up: Tensor, down: Tensor, token: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the output rows and a."""
    chosen = x.index_select(0, token)
    a = F.grouped_mm(chosen, gate_up.to(x.dtype).mT, offs=ends)
    del chosen
    return F.grouped_mm(_swiglu(a), down.to(x.dtype).mT, offs=ends), a


def _backward_grouped(
    drows: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    token: Tensor,
    ends: Tensor,
    a: Tensor,
    needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute d(gathered x), dgate_up and ddown; None where not needed."""
    need_x, need_in, need_out = needs
    dchosen = dgate_up = ddown = None
    ds = F.grouped_mm(drows, down.to(x.dtype), offs=ends)
    da, s = _swiglu_backward(a, ds)
    if need_out:
        ddown = _cleared(F.grouped_mm(drows.mT, s, offs=ends), ends).to(down.dtype)
    del ds, s
    if need_in:
        dgate_up = F.grouped_mm(da.mT, x.index_select(0, token), offs=ends)
        dgate_up = _cleared(dgate_up, ends).to(gate_up.dtype)
    if need_x:
        dchosen = F.grouped_mm(da, gate_up.to(x.dtype), offs=ends)
    return dchosen, dgate_up, ddown


def _cleared(dw: Tensor, ends: Tensor) -> Tensor:
    """Zero the gradients of the experts without rows, in place.

    Blackwell leaves them unwritten (pytorch/pytorch#172439). Hopper writes zeros itself,
    so the pass is skipped there.
    """
    if dw.is_cuda and torch.cuda.get_device_capability(dw.device) == (9, 0):
        return dw
    empty = ends.diff(prepend=ends.new_zeros(1)) == 0
    return dw.masked_fill_(empty[:, None, None], 0)


# ---------------------------------------------------------------------------
# Expert by expert: CPU, and float64 anywhere


def _spans(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield each expert and the slice of its rows."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(begin, end)
        begin = end


def _gemm_dtype(x: Tensor) -> torch.dtype:
    """Dtype of the products: float32 where the CPU would emulate bfloat16, else that of x."""
    emulated = x.dtype == torch.bfloat16 and not computes_in_bf16(x.device)
    return torch.float32 if emulated else x.dtype


def _mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a @ b to out, rounded to its dtype."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


def _forward_by_expert(
    x: Tensor, gate_up: Tensor, down: Tensor, token: Tensor, ends: Tensor, save: bool
) -> tuple[Tensor, Tensor]:
    """Compute the output rows and a."""
    dtype = _gemm_dtype(x)
    rows = x.new_empty(token.shape[0], x.shape[1])
    a = x.new_empty(token.shape[0] if save else 0, gate_up.shape[1])
    for expert, span in _spans(ends):
        chosen = x.index_select(0, token[span]).to(dtype)
        inner = a[span] if save else x.new_empty(chosen.shape[0], gate_up.shape[1])
        _mm(chosen, gate_up[expert].to(dtype).mT, inner)
        _mm(_swiglu(inner.to(dtype)), down[expert].to(dtype).mT, rows[span])
    return rows, a


def _backward_by_expert(
    drows: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    token: Tensor,
    ends: Tensor,
    a: Tensor,
    needs: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute d(gathered x), dgate_up and ddown; None where not needed."""
    dtype = _gemm_dtype(x)
    dchosen = torch.empty_like(drows) if needs[0] else None
    dgate_up = torch.empty_like(gate_up) if needs[1] else None
    ddown = torch.empty_like(down) if needs[2] else None
    for expert, span in _spans(ends):
        drow = drows[span].to(dtype)
        da, s = _swiglu_backward(a[span].to(dtype), drow @ down[expert].to(dtype))
        if ddown is not None:
            _mm(drow.mT, s, ddown[expert])
        if dgate_up is not None:
            _mm(da.mT, x.index_select(0, token[span]).to(dtype), dgate_up[expert])
        if dchosen is not None:
            _mm(da, gate_up[expert].to(dtype), dchosen[span])
    return dchosen, dgate_up, ddown


# ---------------------------------------------------------------------------
# The op


def _run_forward(x, gate_up, down, token, inverse, ends, save):
    """Compute rows and a (no rows unless save is True)."""
    x, gate_up, down = packed(x, gate_up, down)
    with no_autocast(x):
        if not _one_gemm(x):
            return _forward_by_expert(x, gate_up, down, token, ends, save)
        if not token.shape[0]:
            return x.new_empty(0, x.shape[1]), x.new_empty(0, gate_up.shape[1])
        rows, a = _forward_grouped(x, gate_up, down, token, ends)
        return rows, a if save else a.new_empty(0, a.shape[1])


def _run_backward(drows, x, gate_up, down, token, inverse, ends, a, needs):
    """Compute dx, dgate_up, ddown; None where not needed."""
    x, gate_up, down, drows = packed(x, gate_up, down, drows)
    if not token.shape[0]:
        inputs = zip((x, gate_up, down), needs, strict=True)
        return [torch.zeros_like(t) if need else None for t, need in inputs]
    backward = _backward_grouped if _one_gemm(x) else _backward_by_expert
    with no_autocast(x):
        dchosen, dgate_up, ddown = backward(drows, x, gate_up, down, token, ends, a, needs)
        dx = None if dchosen is None else F.embedding_bag(inverse, dchosen, mode="sum")
    return dx, dgate_up, ddown


def _fake(x, gate_up, down, token, inverse, ends, save):
    n_rows = token.shape[0]
    a = x.new_empty((n_rows if save else 0, gate_up.shape[1]))
    return x.new_empty((n_rows, x.shape[1])), a


def _fake_backward(drows, x, gate_up, down, token, inverse, ends, a, needs):
    return fake_gradients(needs, x, gate_up, down)


def _save(inputs, output):
    return Saved((*inputs[:-1], output[1]))


_forward, _backward = define(
    "experts",
    arguments="Tensor x, Tensor gate_up, Tensor down, Tensor token, Tensor inverse, Tensor ends, "
    "bool save",
    results=("rows", "a"),
    gradients_from=("rows",),
    gradients_for=("x", "gate_up", "down"),
    forward=_run_forward,
    fake=_fake,
    save=_save,
    backward_arguments="Tensor drows, Tensor x, Tensor gate_up, Tensor down, Tensor token, "
    "Tensor inverse, Tensor ends, Tensor a, bool[] needs",
    backward=_run_backward,
    backward_fake=_fake_backward,
)
