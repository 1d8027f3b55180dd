"""In-context regression: infer a linear function from examples. Difficulty: its inputs k.

    3 1 = 5 ; 0 4 = 6 ; 2 2 = 3 ; ...                       (k = 2, modulo 7)

y = a x modulo 7, with a and x in [0, 7)^k. The first k examples have linearly independent x, so
they determine a; the y of the 4 examples after them are the answers.

Yang 2023 (arXiv 2311.12424) regresses real numbers: x drawn from a normal distribution, read in by
a matrix, y predicted as a number under a squared error at every example, also before the
examples determine a; sparse linear functions, trees and networks, too. Here numbers are tokens, the
field is finite and the loss is a cross-entropy: a language model trains on it as it is, but
nearly right answers do not exist, and least squares does not apply.
"""

import numpy as np

from deeploop.data.tasks.base import NextTokenTask, digits
from deeploop.data.tasks.draw import Draw

PRIME = 7
QUERIES = 4


class Regression(NextTokenTask):
    """`difficulty` + 4 examples "x = y ;" of one linear function; the last 4 y are answers."""

    symbols = (".", "=", ";", *digits(PRIME))

    def places(self, difficulty: int) -> np.ndarray:
        examples = difficulty + QUERIES
        mask = np.zeros((examples, difficulty + 3), bool)
        mask[difficulty:, difficulty + 1] = True
        return mask.ravel()[1:-1]  # no ";" at the end

    def choices(self, difficulty: int) -> int:
        return PRIME

    def answered(self, draw: Draw, difficulty: int) -> np.ndarray:
        k = difficulty
        x = np.concatenate((_independent(draw, k), draw.below(PRIME, QUERIES, k)), axis=1)
        y = (x @ draw.below(PRIME, k, 1)) % PRIME
        zero, equals, end = self.ids("0", "=", ";")
        mark = np.ones_like(y)
        examples = np.concatenate((zero + x, equals * mark, zero + y, end * mark), axis=2)
        return examples.reshape(draw.n, -1)[:, :-1]


def _independent(draw: Draw, k: int) -> np.ndarray:
    """Draw invertible matrices modulo PRIME, as triangular factors in a drawn order of rows.

    int64 [n, k, k].
    """
    lower = np.tril(draw.below(PRIME, k, k), -1) + np.eye(k, dtype=np.int64)
    upper = np.triu(draw.below(PRIME, k, k), 1)
    upper += (1 + draw.below(PRIME - 1, k))[:, :, None] * np.eye(k, dtype=np.int64)
    order = draw.order(k)
    return np.take_along_axis((lower @ upper) % PRIME, order[:, :, None], axis=1)
