"""Fields of the depth rules, and the values of `model.depth`.

A depth rule says which tokens take part in a loop, and which state the head reads after the
loops; `deeploop.model.depth` has a file for each.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from deeploop.config.fields import (
    FRACTION,
    LOGIT,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    check_fields,
    flag,
)


class DepthChoice(NamedTuple):
    """One value of `model.depth`: its class, and the settings it goes together with."""

    rule: str  # "module:Class", a subclass of deeploop.model.depth.base.Depth
    section: str | None = None  # the section of ModelConfig that only this rule reads
    gate: bool = False  # whether it gives an exit probability after each loop, for train.loss
    backprops: tuple[str, ...] = ("full", "segments", "last", "progressive")
    per_sequence: bool = True  # whether sequences may have numbers of loops of their own


# The registry of depth rules. A new rule is a file in deeploop/model/depth/ and a line here.
DEPTHS = {
    "fixed": DepthChoice("deeploop.model.depth.base:Depth"),
    "act": DepthChoice(
        "deeploop.model.depth.act:ACT", section="act", backprops=("full", "last", "progressive")
    ),
    "gate": DepthChoice("deeploop.model.depth.gate:ExitGate", gate=True),
    "fixed_point": DepthChoice(
        "deeploop.model.depth.fixed_point:FixedPoint", section="solver",
        backprops=("full", "last"), per_sequence=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ActConfig:
    """Adaptive computation time (arXiv 1603.08983, 1807.03819); read by `depth` act alone."""

    epsilon: Annotated[float, flag("a token halts once its sum exceeds 1 - epsilon"), FRACTION] = (
        0.01
    )
    ponder_weight: Annotated[
        float, flag("weight tau of the mean of loops taken and remainder"), NOT_NEGATIVE
    ] = 0.01
    bias: Annotated[
        float, flag("initial bias of the halting logit; lower takes more loops at first"), LOGIT
    ] = 1.0
    output: Annotated[
        Literal["mean", "interpolate"],
        flag("mean: the states' weighted mean (Graves); interpolate: s w + y (1 - w), as in UT"),
    ] = "mean"

    def __post_init__(self) -> None:
        check_fields(self, "model.act.")


@dataclass(frozen=True)
class SolverConfig:
    """Fixed points (arXiv 1909.01377); read by `depth` fixed_point alone."""

    method: Annotated[
        Literal["plain", "anderson"],
        flag("solver without gradient: plain repeats the loop, anderson mixes its last states"),
    ] = "plain"
    tolerance: Annotated[
        float,
        flag("relative residual at which a token is at rest; 0: all loops run"),
        NOT_NEGATIVE,
    ] = 1e-3
    memory: Annotated[int, flag("states that anderson mixes"), POSITIVE] = 3
    damping: Annotated[
        float,
        flag("tau of a loop with gradient, s <- tau f(s) + (1 - tau) s; 1: no damping"),
        POSITIVE_SHARE,
    ] = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "model.solver.")
