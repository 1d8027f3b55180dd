"""Fields of reasoners: models of two states that a puzzle's answer is worked out in (HRM, TRM)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from deeploop.config import scaling
from deeploop.config.fields import NOT_NEGATIVE, POSITIVE, SHARE, check_fields, flag


@dataclass(frozen=True)
class ReasonerConfig:
    """A reasoner (model.kind=reasoner): `n_layers` blocks in each of its modules L and H."""

    cycles_high: Annotated[int, flag("passes of H in a segment (H_cycles)"), POSITIVE] = 2
    cycles_low: Annotated[int, flag("passes of L before each of H (L_cycles)"), POSITIVE] = 2
    shared: Annotated[bool, flag("one network as both modules (TRM)")] = False
    gradient: Annotated[
        Literal["one_step", "last_cycle"],
        flag(
            "passes with gradient: one_step, the last of L and the last of H (HRM); last_cycle, "
            "the last of H and all of L before it (TRM)"
        ),
    ] = "one_step"
    mixer: Annotated[
        Literal["attention", "mlp"],
        flag("mixing of positions: attention to all, or a SwiGLU across positions (TRM)"),
    ] = "attention"
    positions: Annotated[bool, flag("RoPE in attention; else none")] = True
    puzzle_tokens: Annotated[
        int, flag("tokens of each puzzle's own embedding, before the cells; 0: none"), NOT_NEGATIVE
    ] = 0
    puzzles: Annotated[int, flag("rows of the puzzle embedding; 0: the data's"), NOT_NEGATIVE] = 0
    halting: Annotated[
        Literal["halt_continue", "halt"],
        flag("halt where q_halt > q_continue (HRM), or where q_halt > 0 (TRM)"),
    ] = "halt_continue"
    segments: Annotated[int, flag("most segments of a sequence, each a step"), POSITIVE] = 16
    exploration: Annotated[
        float, flag("probability that a row may not halt before a drawn segment"), SHARE
    ] = 0.1
    visits: Annotated[
        Literal["none", "paper", "counted"],
        flag(
            "sublayer visits M_g that alpha = M_g^p and beta = (4 M_g)^-p of h' = RMS(alpha h + f) "
            "follow from: none, alpha = beta = 1; paper, 2 K (1 + L_cycles) of DeepLoop on HRM; "
            "counted, those with gradient"
        ),
    ] = "none"

    def __post_init__(self) -> None:
        check_fields(self, "model.reasoner.")

    @property
    def calls_with_gradient(self) -> int:
        """Passes of a module through which gradients go in a segment; the last ones."""
        return 2 if self.gradient == "one_step" else self.cycles_low + 1

    def blocks_of_scales(self, n_layers: int) -> float | None:
        """Return N_g = M_g / 2, from which alpha and beta follow; None: both are 1."""
        if self.visits == "none":
            return None
        low = self.cycles_low if self.visits == "paper" else self.calls_with_gradient - 1
        return scaling.hierarchical_blocks(n_layers, n_layers, low)
