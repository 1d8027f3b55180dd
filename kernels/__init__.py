"""Fused residual updates for looped Transformers, each forward and backward.

Every op runs on CPU (closed form in PyTorch) and on CUDA (Triton) under the same
name; `reference` is the specification in plain PyTorch.
"""

from .post_sandwich import post_sandwich
from .pre_norm import pre_norm

__all__ = ["post_sandwich", "pre_norm"]
