"""Kept until the kernels import the new name."""

from deeploop.utils.errors import Diverged, InputError

__all__ = ["Diverged", "InputError"]
