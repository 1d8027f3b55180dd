"""Draw the random numbers of examples as a pure function of each example's key."""

import numpy as np

from deeploop.data.batches import mix

_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
TRAIN, HELD_OUT = 0, 1  # values of `split`


def example_keys(seed: int, split: int, index: np.ndarray) -> np.ndarray:
    """Return a key for each example: uint64 [n].

    The split is a bit of the key: no example for training has the key of a held-out one, whatever
    their seeds and indices.

    Args:
        seed: of the examples.
        split: TRAIN or HELD_OUT.
        index: uint64 [n], the examples' places in the split.
    """
    start = mix(np.array([(seed + _GOLDEN) & _WORD], np.uint64))
    return (mix(start ^ mix(index)) & ~np.uint64(1)) | np.uint64(split)


class Draw:
    """Random numbers for n examples of one difficulty, each from its key alone.

    The j-th number of an example is a hash of (key, difficulty, j), so it depends neither on the
    other examples nor on a generator's state. A task draws the same numbers in the same order for
    all examples.

    Args:
        keys: uint64 [n].
        difficulty: of the examples.
    """

    def __init__(self, keys: np.ndarray, difficulty: int):
        self.n = len(keys)
        self._keys = mix(keys ^ np.uint64(difficulty * _GOLDEN & _WORD))[:, None]
        self._count = 0

    def words(self, *shape: int) -> np.ndarray:
        """Draw 64-bit words: uint64 [n, *shape]."""
        size = int(np.prod(shape))
        counter = np.arange(self._count + 1, self._count + 1 + size, dtype=np.uint64)
        self._count += size
        return mix(self._keys + counter * np.uint64(_GOLDEN)).reshape(self.n, *shape)

    def below(self, limit: int, *shape: int) -> np.ndarray:
        """Draw integers evenly from [0, limit): int64 [n, *shape]."""
        return (self.words(*shape) % np.uint64(limit)).astype(np.int64)

    def uniform(self, *shape: int) -> np.ndarray:
        """Draw numbers evenly from [0, 1): float64 [n, *shape]."""
        return (self.words(*shape) >> np.uint64(11)) * 2.0**-53

    def order(self, size: int) -> np.ndarray:
        """Draw a permutation of [0, size) for each example: int64 [n, size]."""
        return np.argsort(self.words(size), axis=1, kind="stable")
