"""Small PyTorch helpers that the ops share, on tensors of shape [rows, d]."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Dtype of the arithmetic: float64 if any tensor is float64, else float32."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


@contextlib.contextmanager
def no_autocast(x: Tensor) -> Iterator[None]:
    """Disable an enclosing autocast for the ATen calls inside an op."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, enabled=False):
        yield


def count(x: Tensor) -> int:
    """Number of rows of x; unlike numel() // d it stays exact for a traced shape."""
    return math.prod(x.shape[:-1])


def as_rows(*xs: Tensor | None) -> list[Any]:
    """Reshape each tensor to a contiguous [rows, d]; None stays None.

    Copies only tensors that are strided or expanded.
    """
    return [None if x is None else x.reshape(-1, x.shape[-1]).contiguous() for x in xs]


def packed(*xs: Tensor | None) -> list[Any]:
    """Make each tensor contiguous, which copies only strided or expanded ones; None stays None."""
    return [None if x is None else x.contiguous() for x in xs]


def view_as(shape: torch.Size, *xs: Tensor | None) -> list[Any]:
    """View each [rows, d] tensor in the given shape; None stays None."""
    return [None if x is None else x.view(shape) for x in xs]


def rstd(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) per row, [rows, 1]; 0 where the mean square overflows."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def row_sum(x: Tensor, w: Tensor | None) -> Tensor:
    """Sum over each row of x * w, [rows, 1], without forming the product."""
    return x.sum(-1, keepdim=True) if w is None else torch.mv(x, w.to(x.dtype))[:, None]


def column_sum(x: Tensor, row_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the rows of x * row_scale, [d]: the gradient of a gain."""
    return torch.mv(x.T, row_scale.reshape(-1)).to(dtype)


def gain_gradient(partial: Tensor | None, w: Tensor | None, need: bool) -> Tensor | None:
    """Gradient of the gain w from a sum [d] or partial sums [programs, d]; None if not needed.

    Zero where `partial` is None: the norm's output was not used.
    """
    if not need or w is None:
        return None
    if partial is None:
        return torch.zeros_like(w)
    return (partial.sum(0) if partial.dim() == 2 else partial).to(w.dtype)
