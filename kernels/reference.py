"""The kernels' specification: every op in plain PyTorch, differentiable, any dtype.

Arithmetic is float32, or float64 as soon as one input is float64; results are
rounded once, at the end. The kernels are compared with these functions run in
float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rows import compute_dtype


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
) -> tuple[Tensor, Tensor]:
    """h' = RMSNorm(alpha * h + f) * w_out ; n = RMSNorm(h') * w_next."""
    dtype = compute_dtype(h, f, w_out, w_next)
    h_new = rms_norm(alpha * h.to(dtype) + f.to(dtype), w_out, eps)
    n = rms_norm(h_new, w_next, eps)
    return h_new.to(h.dtype), n.to(f.dtype)


def pre_norm(
    h: Tensor,
    f: Tensor,
    w_next: Tensor | None,
    scale: float = 1.0,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """h' = h + scale * f ; n = RMSNorm(h') * w_next."""
    dtype = compute_dtype(h, f, w_next)
    h_new = h.to(dtype) + scale * f.to(dtype)
    n = rms_norm(h_new, w_next, eps)
    return h_new.to(h.dtype), n.to(f.dtype)
