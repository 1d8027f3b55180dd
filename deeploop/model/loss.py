"""Compute the cross-entropy of the head in chunks, without the logits of a whole batch.

Full-vocabulary float32 logits exhaust the memory of a looped model with a loss per segment:
0.2 GB a sequence at 1024 x 50304. Here one chunk of tokens is alive at a time, and its
gradient is taken in forward, so that nothing is recomputed in backward.

torch's own chunked `F.linear_cross_entropy` (2.13) was measured against this
at 2048 x 768 x 50304 on a CPU: its bfloat16 loss is rounded to bfloat16 (10.875
for 10.981).
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.data.batches import IGNORE
from deeploop.kernels._checks import check_reverse_mode

CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of weighted cross-entropies of several states under one head, and each of them."""

    @staticmethod
    def forward(
        ctx, head: Tensor, targets: Tensor, weights: Tensor | None, chunk_rows: int, *states: Tensor
    ):
        w, dtype = head.to(states[0].dtype), torch.promote_types(states[0].dtype, torch.float32)
        total = torch.zeros((), dtype=dtype, device=head.device)
        losses = torch.zeros(len(states), len(targets), dtype=dtype, device=head.device)
        need_w, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
        dn = [torch.empty_like(n) if need else None for n, need in zip(states, needed, strict=True)]
        dw = torch.zeros_like(head) if need_w else None
        for i, start in itertools.product(range(len(states)), range(0, len(targets), chunk_rows)):
            chunk = slice(start, start + chunk_rows)
            n, target = states[i][chunk], targets[chunk]
            logits = F.linear(n, w).to(dtype)
            losses[i, chunk] = F.cross_entropy(
                logits, target, ignore_index=IGNORE, reduction="none"
            )
            scale = None if weights is None else weights[i, chunk, None]
            each = losses[i, chunk]
            total += (each if scale is None else each * scale[:, 0]).sum()
            if not (needed[i] or need_w):
                continue
            grad = _grad_logits(logits, target)
            grad = (grad if scale is None else grad.mul_(scale)).to(n.dtype)
            if (out := dn[i]) is not None:
                torch.mm(grad, w, out=out[chunk])
            if dw is not None:
                dw += grad.t() @ n
        ctx.save_for_backward(dw, losses if ctx.needs_input_grad[2] else None, *dn)
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _: Tensor):
        # The saved gradients are constants to autograd: their own derivative would be lost.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "linear_cross_entropy: has no second derivative; "
                "call backward() or torch.autograd.grad without create_graph=True"
            )
        dw, losses, *dn = ctx.saved_tensors
        # Out of place: a saved tensor is never written, so retain_graph is safe. As a
        # vector grad_loss takes part in type promotion: 1/tokens rounded to bfloat16
        # would scale every gradient below the head, and not the head's, by up to 0.4%.
        dn = [None if x is None else (x * grad_loss[None]).to(x.dtype) for x in dn]
        dw = None if dw is None else dw * grad_loss.to(dw.dtype)
        d_weights = None if losses is None else losses * grad_loss
        return dw, None, d_weights, None, *dn


def _grad_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return d(sum of cross-entropies)/d(logits) = softmax - onehot, 0 where ignored."""
    keep = targets != IGNORE
    grad = logits.softmax(-1)
    grad.scatter_add_(1, targets.clamp_min(0)[:, None], torch.full_like(grad[:, :1], -1.0))
    return grad.mul_(keep[:, None])


def linear_cross_entropy(
    n: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int | None = None
) -> Tensor:
    """Compute the summed cross-entropy, in nats, of the head `n @ weight.T`.

    Args:
        n: [..., d] final states, any float dtype; the GEMMs run in it.
        weight: [vocab, d]; its gradient accumulates in its own dtype.
        targets: int64 [...], -100 is ignored.
        chunk_rows: rows of logits alive at once; by default what fits 64 MiB on
            a CPU and 256 MiB on a GPU in float32.

    Returns:
        float32 scalar (float64 where n is): the sum over targets, so that the caller can weight by
        tokens.

    Raises:
        NotImplementedError: for a second or a forward-mode derivative, or under torch.func.grad.
    """
    return loop_cross_entropy([n], weight, targets, chunk_rows=chunk_rows)[0]


def loop_cross_entropy(
    states: Sequence[Tensor],
    head: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropies of several loops' states, in nats, and their weighted sum.

    No two loops' logits are alive at once, and the head has one gradient for all loops.

    Args:
        states: R final states [..., d], any float dtype; the GEMMs run in it.
        head: [vocab, d]; its gradient accumulates in its own dtype.
        targets: int64 [...], -100 is ignored.
        weights: float32 [R, ...], of each loop and target; differentiable. None: ones.
        chunk_rows: as for `linear_cross_entropy`.

    Returns:
        The weighted sum, a scalar, and the cross-entropies [R, ...], without gradient, 0 where
        ignored: float32, or float64 where the states are.

    Raises:
        NotImplementedError: as `linear_cross_entropy`.
    """
    check_reverse_mode("linear_cross_entropy", *states, head)
    rows = default_chunk_rows(states[0], head) if chunk_rows is None else chunk_rows
    flat = [n.reshape(-1, n.shape[-1]) for n in states]
    w = None if weights is None else weights.reshape(len(flat), -1)
    total, losses = _LinearCrossEntropy.apply(head, targets.reshape(-1), w, rows, *flat)
    return total, losses.view(len(flat), *targets.shape)


def default_chunk_rows(n: Tensor, weight: Tensor) -> int:
    """Return the tokens whose float32 logits fill the device's chunk budget; at least one."""
    return max(1, CHUNK_BYTES.get(n.device.type, 2**26) // (4 * weight.shape[0]))
