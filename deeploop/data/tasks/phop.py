"""p-hop induction: follow a letter's latest earlier occurrence p times. Difficulty: p.

    a c b c a b > > b                                       (64 letters, here 6; p = 2)

One hop goes from place i to find(i), the latest j <= i with v[j - 1] = v[i]: the place after the
letter's latest earlier occurrence. The answer is the letter after p hops from the last letter.
Here b at place 5 occurs before at place 2, which leads to c at 3; c occurs before at place 1,
which leads to b at 2.

Sources: Sanford 2024, arXiv 2402.09268; Saunshi 2025, arXiv 2502.17416 (256 letters of an alphabet
of 4, a model for each p). Here p is the number of ">", so that one model reads every p, and
sequences in which p hops lead past the start are drawn again.
"""

import numpy as np

from deeploop.data.tasks.base import NextTokenTask, last
from deeploop.data.tasks.draw import Draw

LETTERS = 64  # of a sequence: 12 hops go over 48 places on average
ALPHABET = "abcd"


class PHop(NextTokenTask):
    """64 letters, `difficulty` times ">", and the letter that many hops lead to."""

    symbols = (".", ">", *ALPHABET)

    def places(self, difficulty: int) -> np.ndarray:
        return last(1, LETTERS + difficulty + 1)

    def choices(self, difficulty: int) -> int:
        return len(ALPHABET)

    def answered(self, draw: Draw, difficulty: int) -> np.ndarray:
        letters = np.empty((draw.n, LETTERS), np.int64)
        place = np.zeros(draw.n, np.int64)
        missing = np.arange(draw.n)
        while len(missing):  # the k-th try of an example is the same, whatever the others need
            letters[missing] = draw.below(len(ALPHABET), LETTERS)[missing]
            place[missing] = hop(letters[missing], difficulty)
            missing = missing[place[missing] < 0]
        answer = np.take_along_axis(letters, place[:, None], 1)
        first, more = self.ids(ALPHABET[0], ">")
        hops = np.full((draw.n, difficulty), more)
        return np.concatenate((first + letters, hops, first + answer), axis=1)


def hop(letters: np.ndarray, hops: int) -> np.ndarray:
    """Return the place that hops from the last letter lead to, -1 where one leads nowhere.

    letters: int64 [n, length], from 0 -> int64 [n].
    """
    n, length = letters.shape
    places, rows = np.arange(length), np.arange(n)
    latest = np.full((len(ALPHABET), n, length + 1), -1)  # the latest place of a letter before i
    for letter in range(len(ALPHABET)):
        seen = np.where(letters == letter, places, -1)
        latest[letter, :, 1:] = np.maximum.accumulate(seen, axis=1)
    place = np.full(n, length - 1)
    for _ in range(hops):
        before = latest[letters[rows, place], rows, place]
        place = np.where((place < 0) | (before < 0), -1, before + 1)
    return place
