"""The modules inside deeploop.kernels that the tests look into, all named here."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from deeploop.kernels import _launch, aot
from deeploop.kernels.triton import expert_combine as combine_kernels
from deeploop.kernels.triton import sigmoid_router as router_kernels

__all__ = ["aot", "combine_kernels", "router_kernels"]

MAX_D = _launch.MAX_D
Config, Launch = _launch.LaunchConfig, _launch.Launch
interpreting, jit = _launch.interpreting, _launch.jit
tl, uses_triton = _launch.tl, _launch.uses_triton


def launches_of(op: str, x: Tensor, gain: Tensor | None) -> dict[str, Any]:
    """Return the launches of one op on rows like x with a gain like `gain`, by title.

    Args:
        op: Name of an op, e.g. "post_sandwich".
        x: [rows, d].
        gain: [d], or None for launches without gains.
    """
    return importlib.import_module(f"deeploop.kernels.{op}").aot_launches(x, gain)


def operator(name: str) -> torch._ops.OpOverload:
    """Return a registered operator, e.g. "expert_combine_backward"."""
    return getattr(torch.ops.deeploop, name).default
