"""Plan how far gradients go back through the loops, and when the optimizer steps.

    full         one segment: all loops
    segments(K)  a segment every K loops (the last may be shorter)
    last(k)      one segment: the last k loops; the loops before run without gradient

`deeploop.train.backprop` runs a segment.
"""

from typing import NamedTuple

from deeploop.config.train import TrainConfig


class Segment(NamedTuple):
    """Loops that one backward goes through, and loops before them that run without gradient."""

    no_grad_loops: range
    loops: range


def segments(t: TrainConfig, loops: int) -> list[Segment]:
    """List the segments of a batch, in the order in which they run."""
    if t.backprop == "last":
        first = loops - t.backprop_loops
        return [Segment(range(first), range(first, loops))]
    size = loops if t.backprop == "full" else t.backprop_loops
    return [
        Segment(range(0), range(first, min(first + size, loops))) for first in range(0, loops, size)
    ]


def optimizer_steps(t: TrainConfig, loops: int) -> list[list[Segment]]:
    """Group the segments of a batch: an optimizer step comes after each group."""
    listed = segments(t, loops)
    return [[s] for s in listed] if t.step_per == "segment" else [listed]
