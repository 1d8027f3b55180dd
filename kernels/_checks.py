"""Checks of an op's inputs; each refusal names the field, its value and the allowed values."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from deeploop.utils.errors import InputError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_rows(op: str, **tensors: Tensor) -> None:
    """Refuse activations that differ in shape or device, or have no supported float dtype.

    Raises: InputError; NotImplementedError for a derivative that no op has.
    """
    check_reverse_mode(op, *tensors.values())
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
    """Refuse gains that are not one float per column on the device of `like`.

    Raises: InputError; NotImplementedError for a derivative that no op has.
    """
    check_reverse_mode(op, *gains.values())
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

    Called inside the op, not while it is traced: a check on a traced float
    would compile the value in.

    Raises: InputError.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise InputError(f"{op}: eps is {eps}; allowed: a finite number, 0 or more")
    for name, value in factors.items():
        if not math.isfinite(value):
            raise InputError(f"{op}: {name} is {value}; allowed: a finite number")


def check_untraced(op: str, eps: float, **factors: float) -> None:
    """Run `check_numbers` unless torch.compile is tracing."""
    if not torch.compiler.is_compiling():
        check_numbers(op, eps, **factors)


def check_norm(op: str, norm: bool, w_next: Tensor | None) -> None:
    """Refuse w_next where norm is False.

    Raises: InputError.
    """
    if w_next is not None and not norm:
        raise InputError(f"{op}: w_next is given and norm is False; allowed: None without the norm")


def check_reverse_mode(op: str, *tensors: Tensor | None) -> None:
    """Refuse tensors that carry a forward-mode tangent, or that torch.func.grad or jvp tracks.

    PyTorch takes the forward-mode derivative of a custom op for zero, without a word.

    Raises: NotImplementedError.
    """
    if torch.compiler.is_compiling():
        return
    for x in tensors:
        if x is None:
            continue
        if _is_tracked(x):
            raise NotImplementedError(
                f"{op}: torch.func.grad, vjp, jvp and the like are not supported; "
                "use torch.autograd.grad or backward()"
            )
        if forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{op}: forward-mode differentiation is not supported; "
                "use torch.autograd.grad or backward()"
            )


def _is_tracked(x: Tensor) -> bool:
    """True for a tensor inside a transform of torch.func that differentiates; vmap does not."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False
