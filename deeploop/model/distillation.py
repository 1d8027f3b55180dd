"""Compute the loss of a model that learns from a text and from a teacher's predictions, in chunks.

For the teacher's distribution q and the model's p over the vocabulary, and the next token y,

    loss = (1 - w) (-log p_y) + w KL(q || p),    KL(q || p) = sum over v of q_v (log q_v - log p_v)
    d loss / d logits = p - (1 - w) onehot(y) - w q

As in `deeploop.model.loss` one chunk of tokens has logits at a time, here of both models, and its
gradient is taken in forward. The model's logits are computed once for both terms.

Source: forward KL at the logits, the best of four in Relaxed Recursive Transformers,
arXiv 2410.20672.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.data.batches import IGNORE
from deeploop.kernels._checks import check_reverse_mode
from deeploop.model.loss import default_chunk_rows


class DistillationTerms(NamedTuple):
    """Sums over the targets, in nats: float32 scalars, or float64 where the states are."""

    total: Tensor  # (1 - w) cross_entropy + w divergence, with gradient
    cross_entropy: Tensor  # without gradient
    divergence: Tensor  # KL(teacher || model), without gradient


class _Distillation(torch.autograd.Function):
    """The weighted sum of cross-entropy and divergence, and each of them."""

    @staticmethod
    def forward(
        ctx, n: Tensor, head: Tensor, targets: Tensor, taught: Tensor, teacher_head: Tensor,
        weight: float, chunk_rows: int,
    ):  # fmt: skip
        w, v = head.to(n.dtype), teacher_head.to(taught.dtype)
        dtype = torch.promote_types(n.dtype, torch.float32)
        sums = torch.zeros(2, dtype=dtype, device=n.device)
        need_n, need_w = ctx.needs_input_grad[:2]
        dn = torch.empty_like(n) if need_n else None
        dw = torch.zeros_like(head) if need_w else None
        for start in range(0, len(targets), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            target, keep = targets[chunk, None].clamp_min(0), targets[chunk, None] != IGNORE
            log_p = F.linear(n[chunk], w).to(dtype).log_softmax(-1)
            log_q = F.linear(taught[chunk], v).to(dtype).log_softmax(-1)
            q = log_q.exp()
            entropy = -log_p.gather(1, target)
            divergence = log_q.sub_(log_p).mul_(q).sum(-1, keepdim=True)
            sums += torch.cat((entropy, divergence), 1).where(keep, 0).sum(0)
            if not (need_n or need_w):
                continue
            grad = log_p.exp_().sub_(q, alpha=weight)
            grad.scatter_add_(1, target, torch.full_like(entropy, weight - 1))
            grad = grad.mul_(keep).to(n.dtype)
            if dn is not None:
                torch.mm(grad, w, out=dn[chunk])
            if dw is not None:
                dw += grad.t() @ n[chunk]
        ctx.save_for_backward(dn, dw)
        ctx.mark_non_differentiable(sums)
        return (1 - weight) * sums[0] + weight * sums[1], sums

    @staticmethod
    def backward(ctx, grad_loss: Tensor, _: Tensor):
        # The saved gradients are constants to autograd: their own derivative would be lost.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "distillation_loss: has no second derivative; "
                "call backward() or torch.autograd.grad without create_graph=True"
            )
        dn, dw = ctx.saved_tensors
        # As a vector grad_loss takes part in type promotion; see `deeploop.model.loss`.
        dn = None if dn is None else (dn * grad_loss[None]).to(dn.dtype)
        dw = None if dw is None else dw * grad_loss.to(dw.dtype)
        return dn, dw, None, None, None, None, None


def distillation_loss(
    n: Tensor,
    head: Tensor,
    targets: Tensor,
    taught: Tensor,
    teacher_head: Tensor,
    weight: float,
    chunk_rows: int | None = None,
) -> DistillationTerms:
    """Compute a model's loss on a text and on its teacher's predictions.

    Args:
        n: [..., d] final states, any float dtype; the GEMMs run in it.
        head: [vocab, d]; its gradient accumulates in its own dtype.
        targets: int64 [...], -100 is ignored in both terms.
        taught: [..., d'] final states of the teacher; no gradient goes to it.
        teacher_head: [vocab, d'].
        weight: w, from 0 (the text alone) to 1 (the teacher alone).
        chunk_rows: rows of logits alive at once; by default half as many as for
            `deeploop.model.loss.linear_cross_entropy`.

    Raises:
        NotImplementedError: for a second or a forward-mode derivative, or under torch.func.grad.
    """
    check_reverse_mode("distillation_loss", n, head)
    rows = max(1, default_chunk_rows(n, head) // 2) if chunk_rows is None else chunk_rows
    total, sums = _Distillation.apply(
        n.reshape(-1, n.shape[-1]), head, targets.reshape(-1),
        taught.detach().reshape(-1, taught.shape[-1]), teacher_head.detach(), weight, rows,
    )  # fmt: skip
    return DistillationTerms(total, *sums)
