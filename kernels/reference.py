"""Specification of the kernels: every op in plain PyTorch, differentiable, in any float dtype.

Arithmetic is float32, or float64 if any input is float64; results are rounded once,
at the end. The tests compare the kernels with these functions run in float64. Arguments
and results are those of the functions of the same names in `deeploop.kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._aten import compute_dtype


def rms_norm(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    """x / RMS(x) * w over the last dimension, in the dtype of x."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if w is None else y * w.to(x.dtype)


def post_sandwich(
    h: Tensor,
    f: Tensor,
    w_out: Tensor | None,
    w_next: Tensor | None,
    alpha: float,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, Any]:
    """h' = RMSNorm(alpha * h + f) * w_out ; n = RMSNorm(h') * w_next."""
    dtype = compute_dtype(h, f, w_out, w_next)
    h_new = rms_norm(alpha * h.to(dtype) + f.to(dtype), w_out, eps)
    n = rms_norm(h_new, w_next, eps).to(f.dtype) if norm else None
    return h_new.to(h.dtype), n


def pre_norm(
    h: Tensor,
    f: Tensor,
    w_next: Tensor | None,
    scale: float = 1.0,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, Any]:
    """h' = h + scale * f ; n = RMSNorm(h') * w_next."""
    dtype = compute_dtype(h, f, w_next)
    h_new = h.to(dtype) + scale * f.to(dtype)
    n = rms_norm(h_new, w_next, eps).to(f.dtype) if norm else None
    return h_new.to(h.dtype), n


def sigmoid_router(
    x: Tensor, w: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose the top_k experts by sigmoid(w @ x) + bias; returns weights, indices, load, z."""
    dtype = compute_dtype(x, w, bias)
    logits = x.reshape(-1, x.shape[-1]).to(dtype) @ w.to(dtype).T
    score = logits.detach().sigmoid()
    biased = score if bias is None else score + bias
    order = biased.sort(dim=-1, descending=True, stable=True).indices
    indices = order[:, :top_k]
    weights = F.logsigmoid(logits).gather(1, indices).softmax(-1)
    load = torch.bincount(indices.flatten(), minlength=w.shape[0])
    z = logits.logsumexp(-1).square().sum() / max(1, logits.shape[0])
    return weights, indices.int(), load, z


def expert_combine(
    h: Tensor,
    routed: Tensor,
    slots: Tensor,
    weights: Tensor,
    shared: Tensor | None,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    scale: float,
    eps: float = 1e-6,
    norm: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """y = weighted sum of each token's expert rows + shared; then branch_sandwich(h, y)."""
    dtype = compute_dtype(h, routed, weights, shared, w_branch, w_next)
    mask = slots >= 0
    token, _ = mask.nonzero(as_tuple=True)
    rows = weights.to(dtype)[mask][:, None] * routed.to(dtype)[slots[mask].long()]
    y = rows.new_zeros(slots.shape[0], h.shape[-1]).index_add(0, token, rows).reshape(h.shape)
    if shared is not None:
        y = y + shared.to(dtype)
    h_new = h.to(dtype) + scale * rms_norm(y, w_branch, eps)
    n = rms_norm(h_new, w_next, eps).to(routed.dtype) if norm else None
    return h_new.to(h.dtype), n


def branch_sandwich(
    h: Tensor,
    f: Tensor,
    w_branch: Tensor | None,
    w_next: Tensor | None,
    scale: float,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """h' = h + scale * RMSNorm(f) * w_branch ; n = RMSNorm(h') * w_next."""
    dtype = compute_dtype(h, f, w_branch, w_next)
    h_new = h.to(dtype) + scale * rms_norm(f.to(dtype), w_branch, eps)
    n = rms_norm(h_new, w_next, eps).to(f.dtype) if norm else None
    return h_new.to(h.dtype), n


def inject(
    h: Tensor,
    x: Tensor,
    w_next: Tensor | None,
    keep: float,
    add: float,
    eps: float = 1e-6,
    *,
    norm: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """h' = keep * h + add * x ; n = RMSNorm(h') * w_next."""
    dtype = compute_dtype(h, x, w_next)
    h_new = keep * h.to(dtype) + add * x.to(dtype)
    n = rms_norm(h_new, w_next, eps).to(x.dtype) if norm else None
    return h_new.to(h.dtype), n


def looping_update(
    h: Tensor,
    f: Tensor,
    local: Tensor | None,
    glob: Tensor | None,
    w_next: Tensor | None,
    *,
    scale: float,
    decay: float,
    read_local: float,
    read_global: float,
    eps: float = 1e-6,
    norm: bool = True,
    memory_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """L' = decay * L + scale * f ; h' = h + read_global * G + read_local * L' ; n as above."""
    dtype = compute_dtype(h, f, local, glob, w_next)
    memory = next((x.dtype for x in (local, glob) if x is not None), memory_dtype)
    local_new = scale * f.to(dtype)
    if local is not None:
        local_new = local_new + decay * local.to(dtype)
    h_new = h.to(dtype) + read_local * local_new
    if glob is not None:
        h_new = h_new + read_global * glob.to(dtype)
    n = rms_norm(h_new, w_next, eps).to(f.dtype) if norm else None
    return h_new.to(h.dtype), local_new.to(memory or compute_dtype(h, f)), n


def looping_update_two(
    h: Tensor,
    f: Tensor,
    local: Tensor | None,
    glob: Tensor | None,
    w_next: Tensor | None,
    *,
    scale: float,
    decay: float,
    read_local: float,
    read_global: float,
    source: str = "output",
    eps: float = 1e-6,
    norm: bool = True,
    memory_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """L' = decay * L + o ; G' = decay * G + (o or r) ; h' = h + r + read_global * G' ; n.

    o = scale * f is the output, r = read_local * L' the readout; `source` is what G takes.
    """
    dtype = compute_dtype(h, f, local, glob, w_next)
    default = memory_dtype or compute_dtype(h, f)
    dtypes = [x.dtype for x in (local, glob) if x is not None] or [default]
    output = scale * f.to(dtype)
    local_new = output if local is None else decay * local.to(dtype) + output
    readout = read_local * local_new
    fed = output if source == "output" else readout
    glob_new = fed if glob is None else decay * glob.to(dtype) + fed
    h_new = h.to(dtype) + readout + read_global * glob_new
    n = rms_norm(h_new, w_next, eps).to(f.dtype) if norm else None
    return h_new.to(h.dtype), local_new.to(dtypes[0]), glob_new.to(dtypes[-1]), n
