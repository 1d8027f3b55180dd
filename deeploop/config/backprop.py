"""Plan how far gradients go back through the loops, and when the optimizer steps."""

from typing import NamedTuple

from deeploop.config import TrainConfig


class Segment(NamedTuple):
    """Loops that one backward goes through, and loops run without gradient ahead of them."""

    ahead: range
    loops: range


def segments(t: TrainConfig, loops: int) -> list[Segment]:
    """The plan of a run, in the order of the walk."""
    if t.backprop == "last":
        first = loops - t.backprop_loops
        return [Segment(range(first), range(first, loops))]
    size = loops if t.backprop == "full" else t.backprop_loops
    return [
        Segment(range(0), range(first, min(first + size, loops))) for first in range(0, loops, size)
    ]


def rounds(t: TrainConfig, loops: int) -> list[list[Segment]]:
    """The plan's segments, in groups with an optimizer step behind each."""
    plan = segments(t, loops)
    return [[s] for s in plan] if t.step_per == "segment" else [plan]
