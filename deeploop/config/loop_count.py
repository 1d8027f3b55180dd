"""Draw the number of loops of a training step, as a pure function of (seed, step).

    fixed     R, of model.loops
    poisson   1 + Poisson(rate), log rate normal with deviation sigma and E[rate] = R
    set       one of train.loop_set, all as likely

Drawn once for a batch, or once for each of its sequences. No generator keeps a state: all ranks
and a resumed run draw the same.

Source: Huginn, arXiv 2502.05171 (poisson, sigma 1/2). As written there the mean of the draws is
R + 1.
"""

import math
from collections.abc import Callable, Iterator
from statistics import NormalDist
from typing import TYPE_CHECKING

from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief

if TYPE_CHECKING:
    from deeploop.config.train import TrainConfig

BITS = 2**64 - 1
STREAMS = {"loops": 1, "progressive": 2}  # numbers of one stream do not depend on another's
LARGEST_RATE = 500.0  # of one Poisson draw: exp(-rate) must not underflow
MOST_LISTED = 2**16  # loops in a list of them


def loops_of_step(t: "TrainConfig", loops: int, step: int) -> int:
    """Return the loops that a step runs: with a draw for each sequence, the largest.

    Args:
        t: of the run.
        loops: R, of the model.
        step: counted from 0.
    """
    if t.loop_count_per == "batch":
        return LOOP_COUNTS[t.loop_count](t, loops, step, 0)
    return max(loops_of_sequences(t, loops, step))


def loops_of_sequences(t: "TrainConfig", loops: int, step: int) -> list[int]:
    """Return the loops of each sequence of a whole batch; the arguments are `loops_of_step`'s."""
    drawn, each = LOOP_COUNTS[t.loop_count], t.loop_count_per == "sequence"
    return [drawn(t, loops, step, row if each else 0) for row in range(t.batch_size)]


def mean_loops(t: "TrainConfig", loops: int) -> float:
    """Return the mean of the loops that a sequence is given."""
    return MEANS[t.loop_count](t, loops)


def loop_set(t: "TrainConfig") -> list[int]:
    """Return the loops listed in train.loop_set; raises ValueError for what is no such list."""
    listed = [int(word) for word in t.loop_set.split(",")]
    if min(listed) < 1:
        raise ValueError("each must be at least 1")
    return listed


def listed_loops(text: str, field: str) -> list[int]:
    """Return the numbers of loops that a text lists, ascending and each once.

        1,2,8        these three
        1..4         1, 2, 3, 4
        1,3..8       1, 3, 5, 7: two dots go on by the difference of the two numbers before them
        1,2,4..32    1, 2, 4, 8, 16, 32: or by the ratio of the three before them, if it is one

    Args:
        text: the list.
        field: its name in an error.

    Raises:
        InputError: it is no such list.
    """
    numbers: list[int] = []
    try:
        for word in text.split(","):
            first, dots, end = word.partition("..")
            numbers.append(int(first))
            if dots:
                numbers += _onward(numbers, int(end))
            if not 1 <= min(numbers) <= max(numbers) <= MOST_LISTED:
                raise ValueError("out of range")
    except ValueError:
        raise InputError(
            f"{field}={brief(repr(text))}: must be numbers of loops from 1 to {MOST_LISTED}, such "
            "as 1,2,8 or 1..8 or 1,2,4..32"
        ) from None
    return sorted(set(numbers))


def _onward(numbers: list[int], end: int) -> Iterator[int]:
    """Yield the numbers that go on from the last ones up to `end`; ValueError if there are none."""
    x, y, last = [0, 0, *numbers][-3:]
    factor = last // y if x and y * y == x * last and last % y == 0 else 1
    step = last - y if y else 1
    if not 1 <= last <= end <= MOST_LISTED or step < 1:
        raise ValueError("does not go on to a larger number")
    while (last := last * factor if factor > 1 else last + step) <= end:
        yield last


def _fixed(t: "TrainConfig", loops: int, step: int, row: int) -> int:
    return loops


def _poisson(t: "TrainConfig", loops: int, step: int, row: int) -> int:
    draw = Uniforms(t.seed, step, row, "loops")
    normal = NormalDist().inv_cdf(draw())
    rate = math.exp(math.log(loops) - t.loop_sigma**2 / 2 + t.loop_sigma * normal)
    terms = max(1, math.ceil(rate / LARGEST_RATE))
    return 1 + sum(poisson_quantile(rate / terms, draw()) for _ in range(terms))


def _from_set(t: "TrainConfig", loops: int, step: int, row: int) -> int:
    listed = loop_set(t)
    return listed[int(Uniforms(t.seed, step, row, "loops")() * len(listed))]


LOOP_COUNTS: dict[str, Callable[["TrainConfig", int, int, int], int]] = {
    "fixed": _fixed, "poisson": _poisson, "set": _from_set,
}  # fmt: skip
MEANS: dict[str, Callable[["TrainConfig", int], float]] = {
    "fixed": lambda t, loops: loops,
    "poisson": lambda t, loops: loops + 1,
    "set": lambda t, loops: sum(loop_set(t)) / len(loop_set(t)),
}


def poisson_quantile(rate: float, u: float) -> int:
    """Return the smallest k at which Poisson's distribution function reaches u, 0 < u < 1."""
    k, probability = 0, math.exp(-rate)
    below = probability
    while below < u and k < rate + 40 * math.sqrt(rate) + 40:  # the sum may round to below u
        k += 1
        probability *= rate / k
        below += probability
    return k


class Uniforms:
    """Numbers evenly drawn from (0, 1), the same for the same seed, step, row and stream."""

    def __init__(self, seed: int, step: int, row: int, stream: str):
        self.key = STREAMS[stream]
        for word in (seed, step, row):
            self.key = _mix(self.key ^ word)
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return ((_mix(self.key + self.count) >> 11) + 0.5) / 2**53


def _mix(x: int) -> int:
    """Scramble a 64-bit number: a step of SplitMix64."""
    x = (x + 0x9E3779B97F4A7C15) & BITS
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ x >> 27) * 0x94D049BB133111EB & BITS
    return x ^ x >> 31
