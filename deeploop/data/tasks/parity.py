"""Parity: whether a number of bits is odd. Difficulty: the number of bits.

    1 0 1 1 = 1

Source: Fan 2024, arXiv 2409.15647 (trained on up to 20 bits, tested on more than 40).
"""

import numpy as np

from deeploop.data.tasks.base import NextTokenTask, last
from deeploop.data.tasks.draw import Draw


class Parity(NextTokenTask):
    """`difficulty` bits, "=", and their sum modulo 2."""

    symbols = (".", "=", "0", "1")

    def places(self, difficulty: int) -> np.ndarray:
        return last(1, difficulty + 2)

    def choices(self, difficulty: int) -> int:
        return 2

    def answered(self, draw: Draw, difficulty: int) -> np.ndarray:
        bits = draw.below(2, difficulty)
        zero, equals = self.ids("0", "=")
        odd = bits.sum(1, keepdims=True) % 2
        return np.concatenate((zero + bits, np.full_like(odd, equals), zero + odd), axis=1)
