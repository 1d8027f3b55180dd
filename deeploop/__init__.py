"""Looped Transformers as one walk over visits, on fused kernels."""

__version__ = "0.1.0"
