"""Plan how far gradients go back through the loops, and when the optimizer steps.

    full         one segment: all loops
    segments(K)  a segment every K loops (the last may be shorter)
    last(k)      one segment: the last k loops; the loops before run without gradient
    progressive  two segments, each from the start: n loops without gradient and k with it,
                 n + k <= R drawn for each step, with weight a; then all loops, with 1 - a

The number of loops is that of the step (`deeploop.config.loop_count`).
`deeploop.train.backprop` runs a segment.

Source: Bansal et al., arXiv 2202.05826 (progressive: n evenly from [0, R), k from [1, R - n]).
"""

from typing import NamedTuple

from deeploop.config.loop_count import Uniforms, loops_of_step
from deeploop.config.train import TrainConfig


class Segment(NamedTuple):
    """Loops that one backward goes through, and loops before them that run without gradient.

    A segment whose first loop is loop 0 starts from the tokens, any other from the state that the
    segment before it has left.
    """

    no_grad_loops: range
    loops: range
    weight: float = 1.0  # of its loss in the step's

    @property
    def from_start(self) -> bool:
        """Whether the segment starts from the tokens."""
        return not (self.no_grad_loops or self.loops).start


def segments(t: TrainConfig, loops: int, step: int = 0) -> list[Segment]:
    """List the segments of a batch, in the order in which they run.

    Args:
        t: of the run.
        loops: R, of the model.
        step: counted from 0; all steps are equal unless they `differ`.
    """
    ran = loops_of_step(t, loops, step)
    if t.backprop == "progressive":
        return _progressive(t, ran, step)
    if t.backprop == "last":
        first = max(0, ran - t.backprop_loops)
        return [Segment(range(first), range(first, ran))]
    size = ran if t.backprop == "full" else t.backprop_loops
    return [
        Segment(range(0), range(first, min(first + size, ran))) for first in range(0, ran, size)
    ]


def differ(t: TrainConfig) -> bool:
    """Return whether the steps of a run may have different segments."""
    return t.loop_count != "fixed" or t.backprop == "progressive"


def _progressive(t: TrainConfig, loops: int, step: int) -> list[Segment]:
    draw = Uniforms(t.seed, step, 0, "progressive")
    n = int(draw() * loops)
    k = 1 + int(draw() * (loops - n))
    share = t.progressive_weight
    listed = [
        Segment(range(n), range(n, n + k), share),
        Segment(range(0), range(loops), 1 - share),
    ]
    return [s for s in listed if s.weight]


def optimizer_steps(t: TrainConfig, loops: int, step: int = 0) -> list[list[Segment]]:
    """Group the segments of a batch: an optimizer step comes after each group."""
    listed = segments(t, loops, step)
    one_each = t.step_per == "segment" and t.backprop == "segments"
    return [[s] for s in listed] if one_each else [listed]
