"""What every row kernel shares: input checks, the launch guard, the config table.

A row kernel sees its inputs as [rows, d]: everything but the last dimension is
flattened. Nothing here needs a GPU, and Triton may be absent (it ships for
Linux only): the kernels are then plain functions that nobody calls.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeploop.errors import InputError

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = types.SimpleNamespace(constexpr=int)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Widest row the Triton kernels are built and spill-checked for; wider rows take
# the PyTorch path.
MAX_D = 16384


def jit(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit`, or nothing at all where Triton is absent."""
    if triton is None:
        return lambda fn: fn
    return triton.jit(**options)


@functools.cache
def interpreting() -> bool:
    """Whether Triton was loaded under its CPU interpreter (TRITON_INTERPRET=1)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def uses_triton(x: Tensor) -> bool:
    """Whether rows like those of x run on the Triton kernels.

    float64 and rows wider than MAX_D do not: they take the PyTorch closed form,
    on any device.
    """
    if not (x.is_cuda or interpreting()):
        return False
    if x.dtype == torch.float64 or x.shape[-1] > MAX_D:
        return False
    if triton is None:
        raise RuntimeError("CUDA tensors need Triton, which is not installed: pip install triton")
    return True


# ---------------------------------------------------------------------------
# Checks


def check_rows(op: str, **tensors: Tensor) -> None:
    """Refuse activations that differ in shape or device, or are not real floats."""
    names = list(tensors)
    first = tensors[names[0]]
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            allowed = ", ".join(str(t).removeprefix("torch.") for t in DTYPES)
            raise InputError(f"{op}: {name} has dtype {x.dtype}; allowed: {allowed}")
        if x.dim() == 0 or x.shape[-1] == 0:
            raise InputError(
                f"{op}: {name} has shape {list(x.shape)}; allowed: [..., d] with d at least 1"
            )
        if x.shape != first.shape:
            raise InputError(
                f"{op}: {name} has shape {list(x.shape)}; "
                f"allowed: the shape of {names[0]}, {list(first.shape)}"
            )
        if x.device != first.device:
            raise InputError(
                f"{op}: {name} is on {x.device}; allowed: the device of {names[0]}, {first.device}"
            )


def check_gains(op: str, like: Tensor, **gains: Tensor | None) -> None:
    """Refuse gains that are not one float per column on the device of `like`."""
    d = like.shape[-1]
    for name, w in gains.items():
        if w is None:
            continue
        if w.dtype not in DTYPES:
            allowed = ", ".join(str(t).removeprefix("torch.") for t in DTYPES)
            raise InputError(f"{op}: {name} has dtype {w.dtype}; allowed: {allowed}")
        if w.dim() != 1 or w.shape[0] != d:
            raise InputError(f"{op}: {name} has shape {list(w.shape)}; allowed: [{d}] or None")
        if w.device != like.device:
            raise InputError(
                f"{op}: {name} is on {w.device}; allowed: the device of the activations, "
                f"{like.device}"
            )


def check_numbers(op: str, eps: float, **factors: float) -> None:
    """Refuse an eps below zero and factors that are not finite.

    Called where an op runs, not where it is traced: a check on a traced float
    would compile the value in.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise InputError(f"{op}: eps is {eps}; allowed: a finite number, 0 or more")
    for name, value in factors.items():
        if not math.isfinite(value):
            raise InputError(f"{op}: {name} is {value}; allowed: a finite number")


# ---------------------------------------------------------------------------
# PyTorch side


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if anything is float64, else float32: never a low-precision sum."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


@contextlib.contextmanager
def no_autocast(x: Tensor) -> Iterator[None]:
    """Keep an enclosing autocast away from the ATen calls inside an op."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, enabled=False):
        yield


def count(x: Tensor) -> int:
    """How many rows x has; unlike numel() // d it stays exact for a traced shape."""
    return math.prod(x.shape[:-1])


def as_rows(x: Tensor) -> Tensor:
    """x as a contiguous [rows, d]; a copy only where x is strided or expanded."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def rstd(x: Tensor, eps: float, scale: Tensor | None = None) -> Tensor:
    """1 / sqrt(mean((scale * x)^2) + eps) per row, [rows, 1]; scale is [rows, 1]."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if scale is not None:
        size.mul_(scale)
    return size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def row_sum(x: Tensor, w: Tensor | None) -> Tensor:
    """Sum over each row of x * w, [rows, 1], without forming the product."""
    return x.sum(-1, keepdim=True) if w is None else torch.mv(x, w.to(x.dtype))[:, None]


def column_sum(x: Tensor, row_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the rows of x * row_scale, [d]: a gain's gradient."""
    return torch.mv(x.T, row_scale.reshape(-1)).to(dtype)


# ---------------------------------------------------------------------------
# Triton side


class Config(NamedTuple):
    """How one launch is cut up: a program holds a [rows, block] tile in registers."""

    block: int
    rows: int
    warps: int
