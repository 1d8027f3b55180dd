"""sigmoid_router: one loop's expert choice in one pass over the tokens.

Forward, per token (w one row per expert; bias steers the choice alone):

    logits  = w @ x                    float32, whatever x is
    s       = sigmoid(logits)
    chosen  = the top_k largest of s + bias; equals: the lower expert first
    weights = s[chosen] / max(S, 1e-9)      S = sum of s[chosen]
    z       = mean over tokens of logsumexp(logits)^2
    load    = how many (token, slot) pairs went to each expert

Slots stand in the order they were chosen. NaN counts as largest, so indices are
distinct and in range whatever comes in. z is 0 where there are no tokens.

Backward, from dweights (G, spread over the experts) and dz, with W the weights
spread over the experts likewise; the choice and the bias pass no gradient:

    ds      = (G - sum(G * W) * [S >= 1e-9]) / max(S, 1e-9)    on the chosen
    dlogits = ds * s * (1 - s) + dz * 2 * logsumexp / T * softmax(logits)
    dx = dlogits @ w                   dw = sum over tokens of dlogits * x

Shapes: x [..., d] with T tokens, w [E, d], bias [E] or None; weights and indices
[T, k], load [E], z []. Dtypes: w and bias float32, so that a model cast to
bfloat16 cannot change the experts in silence; weights and z float32; dx as x. If
anything is float64, so is everything. indices are int32: sorting tokens by
expert then moves half the bytes, F.grouped_mm asks for int32 offsets, and
PyTorch indexes with them. load is int64: counters add it up over whole runs.

Bytes: forward one pass over x. Beside it 8 k bytes a token, and 4 E for the
logits where a gradient will be asked for: with bfloat16 x those are 2 E / d of a
pass, less than the pass that computing them again would read. Backward: one pass
writes dx, one reads x for dw; dlogits costs 4 E bytes a token each time it is
written and read, once up to 128 experts (above, dx is a kernel of its own, which
reads it too). A library GEMM for dw needs x in float32: 5 passes instead of 1,
and it obeys the process's TF32 switch. w comes out of L2.

The matrix products run on tensor cores without giving up float32: every float32
is a sum of three bfloat16, and six of the nine partial products are kept (the
rest is below 2^-26 of |x| |w|). Products of a bfloat16 x take three, and lose
nothing. Loads and dw are sums of per-program partials: no atomics, the same bits
every run. Speed on a GPU: not yet measured.

Source: LOOM's router (sigmoid scores, bias-corrected choice, one router a loop).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deeploop.errors import InputError

from . import rows
from .triton.sigmoid_router import aot_launches, backward_launches, forward_launch

__all__ = ["aot_launches", "sigmoid_router"]

MAX_EXPERTS = 512
SMALLEST = 1e-9  # of the sum that the weights are divided by


def sigmoid_router(
    x: Tensor, w: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> weights [T, k], indices [T, k] int32, load [E] int64, z (mean logsumexp^2)."""
    _check(x, w, bias, top_k)
    save = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    weights, indices, load, z, _ = _forward(x, w, bias, top_k, save)
    return weights, indices, load, z


def _check(x: Tensor, w: Tensor, bias: Tensor | None, top_k: int) -> None:
    """Refuse what cannot be routed, and weights that are no longer float32."""
    rows.check_rows("sigmoid_router", x=x)
    if w.dim() != 2 or w.shape[1] != x.shape[-1] or not 1 <= w.shape[0] <= MAX_EXPERTS:
        raise InputError(
            f"sigmoid_router: w has shape {list(w.shape)}; "
            f"allowed: [experts, {x.shape[-1]}] with 1 to {MAX_EXPERTS} experts"
        )
    experts = w.shape[0]
    if bias is not None and bias.shape != (experts,):
        raise InputError(
            f"sigmoid_router: bias has shape {list(bias.shape)}; allowed: [{experts}] or None"
        )
    for name, t in (("w", w), ("bias", bias)):
        if t is not None and t.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"sigmoid_router: {name} has dtype {t.dtype}; "
                "allowed: float32, float64 (lower precision changes which experts are chosen)"
            )
        if t is not None and t.device != x.device:
            raise InputError(
                f"sigmoid_router: {name} is on {t.device}; allowed: the device of x, {x.device}"
            )
    if not 1 <= top_k <= experts:
        raise InputError(f"sigmoid_router: top_k is {top_k}; allowed: 1 to {experts} (the experts)")


# ---------------------------------------------------------------------------
# PyTorch closed form: the CPU path


@contextlib.contextmanager
def _true_float32(x: Tensor) -> Iterator[None]:
    """No autocast, and no TF32 or bfloat16 products whatever the process has allowed."""
    backends: Any = torch.backends
    backend = (backends.cuda if x.is_cuda else backends.mkldnn).matmul
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        with rows.no_autocast(x):
            yield
    finally:
        backend.fp32_precision = before


def _choose(biased: Tensor, top_k: int) -> Tensor:
    """The top_k largest of each row, equals by column; torch.topk leaves those open."""
    if biased.dtype == torch.float64:
        return biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    # Keys without equals: the order of the floats above, the columns backward below.
    bits = biased.view(torch.int32)
    key = torch.where(biased.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    key = (key << 32) | torch.arange(biased.shape[1] - 1, -1, -1, device=biased.device)
    return key.topk(top_k).indices


def _forward_torch(
    x: Tensor, w: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = rows.compute_dtype(x, w, bias)
    logits = x.to(dtype) @ w.to(dtype).T
    score = logits.sigmoid()
    indices = _choose(score if bias is None else score + bias, top_k)
    weights = score.gather(1, indices)
    weights /= weights.sum(-1, keepdim=True).clamp_(min=SMALLEST)
    load = torch.bincount(indices.flatten(), minlength=w.shape[0])
    z = logits.logsumexp(-1).square_().sum() / max(1, x.shape[0])
    return weights, indices.int(), load, z, logits


def _backward_torch(
    dweights: Tensor | None,
    dz: Tensor | None,
    x: Tensor,
    w: Tensor,
    logits: Tensor,
    indices: Tensor,
    needs: list[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """dx and dw."""
    dtype = logits.dtype
    dlogits = None
    if dz is not None:
        size = logits.logsumexp(-1, keepdim=True) * (dz * (2 / max(1, x.shape[0])))
        dlogits = logits.softmax(-1).mul_(size)
    if dweights is not None:
        chosen = indices.long()
        picked = logits.gather(1, chosen)
        score = picked.sigmoid()
        total = score.sum(-1, keepdim=True)
        clamped = total.clamp(min=SMALLEST)
        shared = (dweights * score).sum(-1, keepdim=True).div_(clamped)
        ds = (dweights - shared.masked_fill_(total < SMALLEST, 0)).div_(clamped)
        ds *= score * torch.sigmoid(-picked)
        dlogits = torch.zeros_like(logits) if dlogits is None else dlogits
        dlogits.scatter_add_(1, chosen, ds)
    assert dlogits is not None, "the autograd formula calls this with dweights or dz"
    dx = (dlogits @ w.to(dtype)).to(x.dtype) if needs[0] else None
    dw = (dlogits.T @ x.to(dtype)).to(w.dtype) if needs[1] else None
    return dx, dw


# ---------------------------------------------------------------------------
# The op


@torch.library.custom_op("deeploop::sigmoid_router", mutates_args=())
def _forward(
    x: Tensor, w: Tensor, bias: Tensor | None, top_k: int, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """-> weights, indices, load, z, logits (for the backward; no rows unless saved)."""
    x, w, bias = rows.as_rows(x), w.contiguous(), rows.packed(bias)
    if rows.uses_triton(x, w, bias):
        (weights, indices, load, z, logits), launch = forward_launch(x, w, bias, top_k, save)
        launch.run(x)
        return weights, indices, load.sum(0), z.sum() / max(1, x.shape[0]), logits
    with _true_float32(x):
        weights, indices, load, z, logits = _forward_torch(x, w, bias, top_k)
    return weights, indices, load, z, logits if save else logits.new_empty(0, w.shape[0])


@_forward.register_fake
def _(x, w, bias, top_k, save):
    like = x.new_empty((), dtype=rows.compute_dtype(x, w, bias))
    n_rows, experts = rows.count(x), w.shape[0]
    return (
        like.new_empty((n_rows, top_k)),
        like.new_empty((n_rows, top_k), dtype=torch.int32),
        like.new_empty((experts,), dtype=torch.int64),
        like,
        like.new_empty((n_rows if save else 0, experts)),
    )


@torch.library.custom_op("deeploop::sigmoid_router_backward", mutates_args=())
def _backward(
    dweights: Tensor | None,
    dz: Tensor | None,
    x: Tensor,
    w: Tensor,
    logits: Tensor,
    indices: Tensor,
    needs: list[bool],
) -> list[Tensor]:
    """The gradients asked for, in the order x, w."""
    shape, x, w = x.shape, rows.as_rows(x), w.contiguous()
    dweights = rows.packed(dweights)
    args = (dweights, dz, x, w, logits, indices, needs)
    if rows.uses_triton(x, logits):
        (dx, dw), launches = backward_launches(*args)
        for launch in launches:
            launch.run(x)
        dw = None if dw is None else dw.sum(0)
    else:
        with _true_float32(x):
            dx, dw = _backward_torch(*args)
    return rows.found(shape, dx) + rows.found(None, dw)


@_backward.register_fake
def _(dweights, dz, x, w, logits, indices, needs):
    return [t.new_empty(t.shape) for t, need in zip((x, w), needs, strict=True) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, w, _, _, _ = inputs
    _, indices, load, _, logits = output
    ctx.save_for_backward(x, w, logits, indices)
    ctx.mark_non_differentiable(indices, load, logits)
    ctx.set_materialize_grads(False)


def _gradients(
    ctx: Any, dweights: Tensor | None, _indices: None, _load: None, dz: Tensor | None, _logits: None
) -> tuple[Any, ...]:
    if dweights is None and dz is None:
        return (None,) * 5
    needs = list(ctx.needs_input_grad[:2])
    found = iter(_backward(dweights, dz, *ctx.saved_tensors, needs))
    return (*(next(found) if need else None for need in needs), None, None, None)


_forward.register_autograd(_gradients, setup_context=_save)
