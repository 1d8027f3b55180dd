"""Compute the cross-entropy of the head in chunks, without the logits of a whole batch.

Full-vocabulary float32 logits exhaust the memory of a looped model with a loss per segment:
0.2 GB a sequence at 1024 x 50304. Here one chunk of tokens is alive at a time, and its
gradient is taken in forward, so that nothing is recomputed in backward.

torch's own chunked `F.linear_cross_entropy` (2.13) was measured against this
at 2048 x 768 x 50304 on a CPU: its bfloat16 loss is rounded to bfloat16 (10.875
for 10.981).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.data.batches import IGNORE
from deeploop.kernels._checks import check_reverse_mode

CHUNK_BYTES = {"cpu": 2**26, "cuda": 2**28}


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int) -> Tensor:
        need_n, need_w = ctx.needs_input_grad[:2]
        w = weight.to(n.dtype)
        compute = torch.promote_types(n.dtype, torch.float32)
        loss = torch.zeros((), dtype=compute, device=n.device)
        dn = torch.empty_like(n) if need_n else None
        dw = torch.zeros_like(weight) if need_w else None
        for start in range(0, n.shape[0], chunk_rows):
            chunk = slice(start, start + chunk_rows)
            logits = F.linear(n[chunk], w).to(compute)
            loss += F.cross_entropy(logits, targets[chunk], ignore_index=IGNORE, reduction="sum")
            if not (need_n or need_w):
                continue
            grad = _grad_logits(logits, targets[chunk]).to(n.dtype)
            if dn is not None:
                torch.mm(grad, w, out=dn[chunk])
            if dw is not None:
                dw += grad.t() @ n[chunk]
        ctx.save_for_backward(dn, dw)
        return loss

    @staticmethod
    def backward(ctx, grad_loss: Tensor):
        # The saved gradients are constants to autograd: their own derivative would be lost.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "linear_cross_entropy: has no second derivative; "
                "call backward() or torch.autograd.grad without create_graph=True"
            )
        dn, dw = ctx.saved_tensors
        # Out of place: a saved tensor is never written, so retain_graph is safe. As a
        # vector grad_loss takes part in type promotion: 1/tokens rounded to bfloat16
        # would scale every gradient below the head, and not the head's, by up to 0.4%.
        dn = None if dn is None else (dn * grad_loss[None]).to(dn.dtype)
        dw = None if dw is None else dw * grad_loss.to(dw.dtype)
        return dn, dw, None, None


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
    check_reverse_mode("linear_cross_entropy", n, weight)
    rows = default_chunk_rows(n, weight) if chunk_rows is None else chunk_rows
    flat = n.reshape(-1, n.shape[-1])
    return _LinearCrossEntropy.apply(flat, weight, targets.reshape(-1), rows)


def default_chunk_rows(n: Tensor, weight: Tensor) -> int:
    """Return the tokens whose float32 logits fill the device's chunk budget; at least one."""
    return max(1, CHUNK_BYTES.get(n.device.type, 2**26) // (4 * weight.shape[0]))
