"""Fields of the depth rules, and the values of `model.depth`.

A depth rule says which tokens take part in a loop, and which state the head reads after the
loops; `deeploop.model.depth` has a file for each.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from deeploop.config.fields import (
    FRACTION,
    LOGIT,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    check_fields,
    flag,
)
from deeploop.utils.errors import InputError

if TYPE_CHECKING:
    from deeploop.config.model import ModelConfig


class DepthChoice(NamedTuple):
    """One value of `model.depth`: its class, and the settings it goes together with."""

    rule: str  # "module:Class", a subclass of deeploop.model.depth.base.Depth
    section: str | None = None  # the section of ModelConfig that only rules which name it read
    gate: bool = False  # whether it gives an exit probability after each loop, for train.loss
    backprops: tuple[str, ...] = ("full", "segments", "last", "progressive")
    per_sequence: bool = True  # whether sequences may have numbers of loops of their own
    narrows: bool = False  # whether a loop of training runs a share of the tokens (`capacities`)


# The registry of depth rules. A new rule is a file in deeploop/model/depth/ and a line here.
DEPTHS = {
    "fixed": DepthChoice("deeploop.model.depth.base:Depth"),
    "act": DepthChoice(
        "deeploop.model.depth.act:ACT", section="act", per_sequence=False,
        backprops=("full", "last", "progressive"),
    ),
    "gate": DepthChoice("deeploop.model.depth.gate:ExitGate", gate=True),
    "fixed_point": DepthChoice(
        "deeploop.model.depth.fixed_point:FixedPoint", section="solver",
        backprops=("full", "last"), per_sequence=False,
    ),
    # Loops without gradient would leave the routers of these two untrained.
    "expert_choice": DepthChoice(
        "deeploop.model.depth.expert_choice:ExpertChoice", section="mor", per_sequence=False,
        narrows=True, backprops=("full", "segments", "progressive"),
    ),
    "token_choice": DepthChoice(
        "deeploop.model.depth.token_choice:TokenChoice", section="mor", per_sequence=False,
        backprops=("full", "progressive"),
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
        flag(
            "relative residual at which a token is at rest (in bfloat16 above 3e-3); 0: all loops "
            "run"
        ),
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


@dataclass(frozen=True)
class MorConfig:
    """Mixture-of-Recursions (arXiv 2507.10524); read by `depth` expert_choice and token_choice."""

    capacity: Annotated[
        str,
        flag(
            "expert_choice: shares of the tokens that take part in each loop, such as 1,.75,.5; "
            "linear: from 1 down to 1/loops"
        ),
    ] = "linear"
    scale: Annotated[float, flag("factor alpha of a router's weight"), POSITIVE] = 1.0
    output: Annotated[
        Literal["convex", "released"],
        flag("a loop's effect with weight w: h + w (f(h) - h), or the released code's h + w f(h)"),
    ] = "convex"
    causal: Annotated[
        Literal["loss", "router"],
        flag(
            "expert_choice: who tells outside of training which tokens take part: the routers "
            "themselves, or a second router for each loop that the stream gets no gradient of"
        ),
    ] = "loss"
    causal_weight: Annotated[
        float,
        flag("expert_choice: weight of the cross-entropy that fits these to training's choice"),
        NOT_NEGATIVE,
    ] = 1e-3

    kv: Annotated[
        Literal["selected", "first"],
        flag("keys and values that a loop reads: of the tokens in it, or the first loop's of all"),
    ] = "selected"
    score: Annotated[
        Literal["softmax", "sigmoid"],
        flag("token_choice: turns the logit of each number of loops into its score"),
    ] = "softmax"
    balance: Annotated[
        float,
        flag("token_choice: weight of the loss that spreads tokens over the numbers of loops"),
        NOT_NEGATIVE,
    ] = 0.1
    z_loss: Annotated[
        float,
        flag("token_choice: weight of the mean squared logsumexp of router logits"),
        NOT_NEGATIVE,
    ] = 1e-3

    def __post_init__(self) -> None:
        check_fields(self, "model.mor.")
        try:
            shares = capacities(self, loops=1)
        except ValueError:
            shares = ()
        falls = all(a >= b for a, b in itertools.pairwise(shares))
        if not shares or not falls or not all(0 < share <= 1 for share in shares):
            raise InputError(
                f"model.mor.capacity={self.capacity!r}: must be linear, or shares above 0 and up "
                "to 1 of which none is larger than the one before it, such as 1,.75,.5"
            )


@functools.lru_cache(maxsize=8)
def capacities(mor: MorConfig, loops: int) -> tuple[float, ...]:
    """Return the share of the tokens that takes part in each loop; loops past the last take it.

    Raises ValueError for what is no list of numbers.
    """
    if mor.capacity == "linear":
        return tuple((loops - loop) / loops for loop in range(loops))
    return tuple(float(share) for share in mor.capacity.split(","))


def check_capacities(m: "ModelConfig") -> None:
    """Refuse capacities of another number of loops, or keys of a loop of some; InputError."""
    if not DEPTHS[m.depth].narrows:
        return
    listed = capacities(m.mor, m.loops)
    if len(listed) != m.loops:
        raise InputError(
            f"model.mor.capacity={m.mor.capacity}: has {len(listed)} shares, and needs one for "
            f"each of model.loops={m.loops}"
        )
    if m.mor.kv == "first" and listed[0] < 1:
        raise InputError(
            f"model.mor.kv=first: needs a first loop of all tokens; begin model.mor.capacity="
            f"{m.mor.capacity} with 1"
        )


def tokens_in_loop(m: "ModelConfig", loop: int, length: int) -> int:
    """Return how many of a sequence's `length` tokens a loop of training runs, at least 1."""
    if not DEPTHS[m.depth].narrows:
        return length
    listed = capacities(m.mor, m.loops)
    share = listed[min(loop, len(listed) - 1)]
    return max(1, int(share * length + 1e-6))  # 2/3 of 3 is 2, whatever 2/3 is rounded to


def key_loops(m: "ModelConfig", loops: int) -> int:
    """Return how many of some loops have keys and values of their own: all, or the first."""
    return 1 if DEPTHS[m.depth].section == "mor" and m.mor.kv == "first" else loops


def loop_shares(m: "ModelConfig", loops: range) -> list[float]:
    """Return the share of the tokens that each of these loops of training runs."""
    if not DEPTHS[m.depth].narrows:
        return [1.0] * len(loops)
    return [tokens_in_loop(m, loop, m.seq_len) / m.seq_len for loop in loops]
