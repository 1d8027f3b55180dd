"""sigmoid_router: choose each token's experts by sigmoid scores, in one pass over the tokens.

Forward, per token (w has one row per expert; bias affects the choice only):

    logits  = w @ x                    float32, whatever x is
    s       = sigmoid(logits)
    chosen  = the top_k largest of s + bias; ties go to the lower expert
    weights = s[chosen] / sum of s[chosen] = softmax(log s[chosen])
    z       = mean over tokens of logsumexp(logits)^2
    load    = number of (token, slot) pairs of each expert

Slots are in the order of choice. NaN counts as largest, so indices are distinct and
in range for any input. z is 0 if there are no tokens.

The weights add up to 1 for any finite logits: every score is computed times e^-m, with m
the largest chosen logit or, if that is positive, 0. The largest of

    t = e^(min(logit, 0) - m) / (1 + e^-|logit|)

is then at least 1/2, where s itself may be too small for a float32.

Backward, from dweights (G, spread over the experts) and dz, with W the weights
spread over the experts likewise; the choice and the bias pass no gradient:

    dlogits = W * (G - sum(G * W)) * (1 - s) + dz * 2 * logsumexp / T * softmax(logits)
    dx = dlogits @ w                   dw = sum over tokens of dlogits * x

Shapes: x [..., d] with T tokens, w [E, d], bias [E] or None; weights and indices
[T, k], load [E], z []. Dtypes: w and bias float32, so that a model cast to
bfloat16 cannot silently choose other experts; weights and z float32; dx as x. If
any input is float64, so are the results. indices are int32: sorting tokens by
expert then moves half the bytes, F.grouped_mm takes int32 offsets, and
PyTorch indexes with them. load is int64, as counters accumulate it over whole runs.

Bytes: forward one pass over x, plus 8 k bytes a token, plus 4 E for the logits if a
gradient will be needed: with bfloat16 x those are 2 E / d of a pass, less than the
pass that computing them again would read. Backward: one pass writes dx, one reads x
for dw; dlogits costs 4 E bytes a token for each write and read, one of each up to
128 experts (above that dx has a separate kernel, which reads it as well). A library
GEMM for dw needs x in float32: 5 passes instead of 1, and it follows the process's
TF32 switch. w is read from L2. Saved for backward: x, w, the logits and the indices.

The matrix products run on tensor cores at float32 accuracy: every float32 is a sum
of three bfloat16, and six of the nine partial products are computed (the rest is
below 2^-26 of |x| |w|). Products with a bfloat16 x take three, without loss. Loads
and dw are sums of per-program partial sums: no atomics, the same bits every run. The
PyTorch form multiplies in float64 and rounds once: the process's switches for faster
float32 products do not reach it, and none is touched, as they belong to all threads.
Speed on a GPU: not yet measured.

Source: LOOM's router (arXiv 2610.01153): sigmoid scores, bias-corrected choice, one
router per loop.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deeploop.utils.errors import InputError

from . import _aten
from ._checks import check_reverse_mode, check_rows
from ._launch import uses_triton
from ._op import Saved, define, fake_gradients
from .triton.sigmoid_router import aot_launches, backward_launches, forward_launch

__all__ = ["aot_launches", "sigmoid_router"]

MAX_EXPERTS = 512


def sigmoid_router(
    x: Tensor, w: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose the top_k experts of each token and their combine weights.

    Args:
        x: tokens, [..., d] with T tokens in all, a float dtype.
        w: router weights, [E, d] with 1 to 512 experts, float32 or float64.
        bias: added to the scores for the choice only, [E], float32 or float64, or None.
        top_k: experts per token, 1 to E.

    Returns:
        weights [T, top_k] float32, indices [T, top_k] int32, load [E] int64 (tokens per
        expert) and the scalar z, the mean of logsumexp(logits)^2. float64 if an input is.

    Raises:
        InputError: if shapes, dtypes or devices disagree, or top_k is out of range.

    Source: LOOM (arXiv 2610.01153).
    """
    _check(x, w, bias, top_k)
    save = torch.is_grad_enabled() and (x.requires_grad or w.requires_grad)
    weights, indices, load, z, _ = _forward(x, w, bias, top_k, save)
    return weights, indices, load, z


def _check(x: Tensor, w: Tensor, bias: Tensor | None, top_k: int) -> None:
    """Refuse tensors that do not fit together, and weights in less than float32.

    Raises: InputError.
    """
    check_rows("sigmoid_router", x=x)
    check_reverse_mode("sigmoid_router", w, bias)
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


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices in float64: neither autocast nor a precision switch changes the result."""
    return a.double() @ b.double()


def _combine_weights(picked: Tensor) -> Tensor:
    """Divide the sigmoids of the chosen logits [T, k] by their sum, which never underflows."""
    largest = picked.amax(-1, keepdim=True).clamp_(max=0)
    scaled = (picked.clamp(max=0) - largest).exp_() / (-picked.abs()).exp_().add_(1)
    return scaled / scaled.sum(-1, keepdim=True)


def _choose(biased: Tensor, top_k: int) -> Tensor:
    """Indices of the top_k largest of each row; ties by column, which torch.topk leaves open."""
    if biased.dtype == torch.float64:
        return biased.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    # Distinct keys: the order of the floats in the high bits, the reversed column below.
    bits = biased.view(torch.int32)
    key = torch.where(biased.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    key = (key << 32) | torch.arange(biased.shape[1] - 1, -1, -1, device=biased.device)
    return key.topk(top_k).indices


def _forward_torch(
    x: Tensor, w: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = _aten.compute_dtype(x, w, bias)
    logits = _product(x, w.T).to(dtype)
    score = logits.sigmoid()
    indices = _choose(score if bias is None else score + bias, top_k)
    weights = _combine_weights(logits.gather(1, indices))
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
    """Compute dx and dw, None where not needed."""
    dlogits = None
    if dz is not None:
        size = logits.logsumexp(-1, keepdim=True) * (dz * (2 / max(1, x.shape[0])))
        dlogits = logits.softmax(-1).mul_(size)
    if dweights is not None:
        chosen = indices.long()
        picked = logits.gather(1, chosen)
        weights = _combine_weights(picked)
        through = dweights - (dweights * weights).sum(-1, keepdim=True)
        through.mul_(weights).mul_(torch.sigmoid(-picked))
        dlogits = torch.zeros_like(logits) if dlogits is None else dlogits
        dlogits.scatter_add_(1, chosen, through)
    assert dlogits is not None, "the autograd formula passes dweights or dz"
    dx = _product(dlogits, w).to(x.dtype) if needs[0] else None
    dw = _product(dlogits.T, x).to(w.dtype) if needs[1] else None
    return dx, dw


# ---------------------------------------------------------------------------
# The op


def _run_forward(x, w, bias, top_k, save):
    """Compute weights, indices, load, z and logits (no rows unless save is True)."""
    x, w, bias = *_aten.as_rows(x), *_aten.packed(w, bias)
    if uses_triton(x, w, bias):
        (weights, indices, load, z, logits), launch = forward_launch(x, w, bias, top_k, save)
        launch.run(x)
        return weights, indices, load.sum(0), z.sum() / max(1, x.shape[0]), logits
    with _aten.no_autocast(x):
        weights, indices, load, z, logits = _forward_torch(x, w, bias, top_k)
    return weights, indices, load, z, logits if save else logits.new_empty(0, w.shape[0])


def _run_backward(dweights, dz, x, w, logits, indices, needs):
    shape = x.shape
    x, w, dweights = *_aten.as_rows(x), *_aten.packed(w, dweights)
    args = (dweights, dz, x, w, logits, indices, needs)
    if uses_triton(x, logits):
        (dx, dw), launches = backward_launches(*args)
        for launch in launches:
            launch.run(x)
        dw = None if dw is None else dw.sum(0)
    else:
        with _aten.no_autocast(x):
            dx, dw = _backward_torch(*args)
    return *_aten.view_as(shape, dx), dw


def _fake(x, w, bias, top_k, save):
    like = x.new_empty((), dtype=_aten.compute_dtype(x, w, bias))
    n_rows, experts = _aten.count(x), w.shape[0]
    return (
        like.new_empty((n_rows, top_k)),
        like.new_empty((n_rows, top_k), dtype=torch.int32),
        like.new_empty((experts,), dtype=torch.int64),
        like,
        like.new_empty((n_rows if save else 0, experts)),
    )


def _fake_backward(dweights, dz, x, w, logits, indices, needs):
    return fake_gradients(needs, x, w)


def _save(inputs, output):
    x, w, _, _, _ = inputs
    _, indices, _, _, logits = output
    return Saved((x, w, logits, indices))


_forward, _backward = define(
    "sigmoid_router",
    arguments="Tensor x, Tensor w, Tensor? bias, SymInt top_k, bool save",
    results=("weights", "indices", "load", "z", "logits"),
    gradients_from=("weights", "z"),
    gradients_for=("x", "w"),
    forward=_run_forward,
    fake=_fake,
    save=_save,
    backward_arguments="Tensor? dweights, Tensor? dz, Tensor x, Tensor w, Tensor logits, "
    "Tensor indices, bool[] needs",
    backward=_run_backward,
    backward_fake=_fake_backward,
)
