"""Fused residual updates for looped Transformers, each forward and backward.

Every op runs on CPU (closed form in PyTorch) and on CUDA (Triton) under the same
name; `reference` is the specification in plain PyTorch, `modules` has each op as an
nn.Module, `registry` is the table of all ops.
"""

from . import modules as modules
from .branch_sandwich import branch_sandwich
from .expert_combine import expert_combine
from .inject import inject
from .looping_update import (
    looping_carry,
    looping_coefficients,
    looping_update,
    looping_update_two,
    two_memory_coefficients,
)
from .post_sandwich import post_sandwich
from .pre_norm import pre_norm
from .sigmoid_router import sigmoid_router

__all__ = [
    "branch_sandwich",
    "expert_combine",
    "inject",
    "looping_carry",
    "looping_coefficients",
    "looping_update",
    "looping_update_two",
    "post_sandwich",
    "pre_norm",
    "sigmoid_router",
    "two_memory_coefficients",
]
