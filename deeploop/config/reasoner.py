"""Fields of reasoners (HRM, TRM), and the residual scales of their two modules.

A reasoner has two states and two modules, L (low) and H (high). A segment is

    C_H times:  C_L times z_L <- L(z_L, z_H + e),  then z_H <- H(z_H, z_L)

and an optimizer step follows each segment. Only its last calls have gradients.

Sources: HRM, arXiv 2506.21734; TRM, arXiv 2510.04871; the residual scales, DeepLoop,
arXiv 2607.13491, section 4.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from deeploop.config import scaling
from deeploop.config.fields import NOT_NEGATIVE, POSITIVE, SHARE, check_fields, flag
from deeploop.utils.errors import InputError

if TYPE_CHECKING:
    from deeploop.config.model import ModelConfig

# Fields of ModelConfig that a reasoner must leave at their defaults: it has no such thing.
WITHOUT = (
    "prelude", "coda", "start", "inject", "loop_norm", "input_norm", "readout_map", "loop_signal",
    "depth", "lora_rank",
)  # fmt: skip


@dataclass(frozen=True)
class ReasonerConfig:
    """Two modules that work in cycles, in the place of loops over blocks; 0 cycles: none."""

    cycles_high: Annotated[
        int, flag("cycles C_H of a segment, one call of H each; 0: no reasoner"), NOT_NEGATIVE
    ] = 0
    cycles_low: Annotated[int, flag("calls C_L of L in a cycle"), POSITIVE] = 2
    layers_high: Annotated[int, flag("blocks K_H of the module H"), POSITIVE] = 2
    layers_low: Annotated[int, flag("blocks K_L of the module L"), POSITIVE] = 2
    shared: Annotated[bool, flag("L has the role of H, too (TRM); K_H is then layers-low")] = False
    gradient: Annotated[
        Literal["one_step", "last_cycle"],
        flag("calls with gradient: the last of L and of H (HRM), or all of the last cycle (TRM)"),
    ] = "one_step"
    mixer: Annotated[
        Literal["attention", "mlp"],
        flag("what mixes positions: attention over all, or a SwiGLU over positions (TRM)"),
    ] = "attention"
    mixer_width: Annotated[
        int,
        flag(
            "inner width of mixer=mlp; 0 means 8/3 of the positions, rounded up to a multiple of 64"
        ),
        NOT_NEGATIVE,
    ] = 0
    positions: Annotated[bool, flag("RoPE in attention; else it does not know positions")] = True
    puzzle_tokens: Annotated[
        int, flag("positions before the cells, the first a vector of the puzzle"), NOT_NEGATIVE
    ] = 0
    puzzles: Annotated[
        int, flag("puzzles that have a vector; 0: as many as the data name"), NOT_NEGATIVE
    ] = 0
    halting: Annotated[
        Literal["halt_continue", "halt"],
        flag("a sequence ends where Q halt exceeds Q continue (HRM), or 0 (TRM)"),
    ] = "halt_continue"
    segments: Annotated[int, flag("most segments of a sequence"), POSITIVE] = 16
    exploration: Annotated[
        float, flag("share of the sequences with a drawn least number of segments"), SHARE
    ] = 0.1
    visits: Annotated[
        Literal["plain", "paper", "counted"],
        flag(
            "residual scales: plain, none; paper, of 2 (K_H + C_L K_L) visits; counted, of the "
            "visits with gradient"
        ),
    ] = "plain"
    scale_per: Annotated[
        Literal["model", "module"],
        flag("one pair of scales of all visits, or one for each module of its own visits"),
    ] = "model"

    def __post_init__(self) -> None:
        check_fields(self, "model.reasoner.")

    @property
    def low_calls(self) -> int:
        """Calls of L with gradient in a segment."""
        return self.cycles_low if self.gradient == "last_cycle" else 1

    @property
    def scaled_calls(self) -> int:
        """R_g(L), the calls of L in a segment that the residual scales count; of H it is 1."""
        return self.cycles_low if self.visits == "paper" else self.low_calls

    @property
    def blocks(self) -> tuple[int, int]:
        """K_H and K_L, the blocks that a call of H and one of L run."""
        return self.layers_low if self.shared else self.layers_high, self.layers_low

    @property
    def scaled_visits(self) -> int:
        """M_g, the sublayer visits in a segment that the residual scales count.

        2 (K_H + R_g(L) K_L): 24 of the paper's HRM (K_H = K_L = 4, C_L = 2), of which the
        released code gives 16 a gradient; 28 of TRM (2 blocks for both roles) at C_L = 6.
        """
        return int(2 * scaling.hierarchical_blocks(*self.blocks, self.scaled_calls))


class Scales(NamedTuple):
    """The residual scales of one module."""

    alpha: float = 1.0  # of the stream, at run time
    beta: float = 1.0  # gain on the initial V, O and FFN matrices


def module_scales(m: "ModelConfig") -> tuple[Scales, Scales]:
    """Return the scales of H and of L: alpha = (2 N_g)^p, beta = (8 N_g)^-p, p = 1/2 by default.

    N_g = M_g / 2 for both (the paper), or with scale_per = module K_H of H, whose weights one call
    meets, and R_g(L) K_L of L, which the paper allows and did not test. A module that both roles
    share has all visits.
    """
    r = m.reasoner
    if r.visits == "plain":
        return Scales(), Scales()
    p = scaling.DEEPLOOP_EXPONENT if m.p is None else m.p
    k_high, k_low = r.blocks
    both = scaling.hierarchical_blocks(k_high, k_low, r.scaled_calls)
    own = r.scale_per == "module" and not r.shared
    blocks = (k_high, k_low * r.scaled_calls) if own else (both, both)
    high, low = (Scales(scaling.alpha(n, p), scaling.beta(n, p)) for n in blocks)
    return high, low


def check_reasoner(m: "ModelConfig", rules: list[str]) -> None:
    """Refuse what a reasoner does not have; raises InputError naming the field.

    Args:
        m: of a model with `reasoner.cycles_high` above 0.
        rules: the values of `residual` that a reasoner can have.
    """
    reason = f"a reasoner (model.reasoner.cycles_high={m.reasoner.cycles_high})"
    for name in WITHOUT:
        value = getattr(m, name)
        if value != getattr(type(m), name):  # a class attribute is the field's default
            raise InputError(f"model.{name}={value}: {reason} has none; leave model.{name} out")
    if m.moe.experts:
        raise InputError(
            f"model.moe.experts={m.moe.experts}: {reason} has no experts; leave it out"
        )
    if m.residual not in rules:
        raise InputError(f"model.residual={m.residual}: {reason} needs {' or '.join(rules)}")
