"""Addition of two numbers. Difficulty: the number of digits of each.

    2 7 + 9 5 = 1 2 2

The sum is written from its highest digit on, with one digit more than the numbers have, so that
its first digit already needs the carries from all others. Numbers may start with 0.

Source: Fan 2024, arXiv 2409.15647, whose model writes all digits of the sum at once; here each
is read before the next is predicted.
"""

import numpy as np

from deeploop.data.tasks.base import NextTokenTask, digits, last
from deeploop.data.tasks.draw import Draw


class Addition(NextTokenTask):
    """Two numbers of `difficulty` digits and their sum of difficulty + 1 digits."""

    symbols = (".", "+", "=", *digits(10))

    def places(self, difficulty: int) -> np.ndarray:
        return last(difficulty + 1, 3 * difficulty + 3)

    def choices(self, difficulty: int) -> int:
        return 10

    def answered(self, draw: Draw, difficulty: int) -> np.ndarray:
        a, b = draw.below(10, 2, difficulty).swapaxes(0, 1)
        total = np.zeros((draw.n, difficulty + 1), np.int64)
        for place in range(difficulty - 1, -1, -1):
            total[:, place + 1] += a[:, place] + b[:, place]
            total[:, place], total[:, place + 1] = np.divmod(total[:, place + 1], 10)
        zero, plus, equals = self.ids("0", "+", "=")
        sign = np.ones((draw.n, 1), np.int64)
        return np.concatenate(
            (zero + a, sign * plus, zero + b, sign * equals, zero + total), axis=1
        )
