"""A physical sublayer: one branch, and the gains of the norms before and after it."""

from collections.abc import Mapping

from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.model.attention import Attention
from deeploop.model.lora import Adapters, LoopAdapters
from deeploop.model.mlp import PositionMixer, SwiGLU
from deeploop.model.moe.layer import MoE
from deeploop.model.residual import Residual

KINDS = {Attention: "attention", SwiGLU: "mlp", PositionMixer: "mlp", MoE: "experts"}


class Sublayer(nn.Module):
    """A branch with the gains of its norms; every visit shares all three.

    `norm_in.weight` [d_model] is the gain of the norm before the branch, `norm_out.weight`
    [d_model] that of the norm after it (`Residual.gains` says which exist). The norms
    themselves run inside the residual rule's kernels. `adapters` has the loops' additions to
    each of the branch's matrices, by its name (`deeploop.model.lora`); it is empty without them.
    """

    adapters: Mapping[str, LoopAdapters]

    def __init__(
        self,
        branch: Attention | SwiGLU | MoE,
        d_model: int,
        rule: Residual,
        loops: int = 1,
        lora_rank: int = 0,
    ):
        super().__init__()
        before, after = rule.gains(KINDS[type(branch)])
        self.norm_in = nn.RMSNorm(d_model) if before else None
        self.norm_out = nn.RMSNorm(d_model) if after else None
        self.branch = branch
        adapters = {
            name: LoopAdapters(linear, loops, lora_rank)
            for name, linear in branch.named_children()
            if lora_rank and isinstance(linear, nn.Linear)
        }
        self.adapters = nn.ModuleDict(adapters)  # type: ignore[assignment]

    def adapters_in(self, loop: int | None) -> Adapters:
        """Return the adapters of the branch's two matrices in a loop counted from 0."""
        if loop is None or not self.adapters:
            return None, None
        first, second = (adapters.of_loop(loop) for adapters in self.adapters.values())
        return first, second

    @property
    def kind(self) -> str:
        """The branch's component of a step: attention, mlp or experts (`utils.spans`)."""
        return KINDS[type(self.branch)]

    @property
    def over_positions(self) -> bool:
        """Whether the branch is a SwiGLU over positions, and not over the width."""
        return isinstance(self.branch, PositionMixer)

    @property
    def gain_in(self) -> Tensor | None:
        """Gain [d_model] of the norm before the branch; None: all ones."""
        return None if self.norm_in is None else self.norm_in.weight

    @property
    def gain_out(self) -> Tensor | None:
        """Gain [d_model] of the norm after the branch; None: all ones, or no such norm."""
        return None if self.norm_out is None else self.norm_out.weight


def block(config: ModelConfig, rule: Residual, looped: bool = True) -> list[Sublayer]:
    """Make one block: attention, then SwiGLU or, in the loop of a model with experts, MoE."""
    d = config.d_model
    branches = (
        Attention(d, config.n_heads, config.qk_norm, config.norm_eps),
        _feed_forward(config, looped),
    )
    rank = config.lora_rank if looped else 0
    return [Sublayer(branch, d, rule, config.loops, rank) for branch in branches]


def _feed_forward(config: ModelConfig, looped: bool) -> SwiGLU | MoE:
    m, d = config.moe, config.d_model
    if not m.experts or not looped:
        return SwiGLU(d, config.ff_width)
    return MoE(
        d,
        n_experts=m.experts,
        top_k=m.top_k,
        d_expert=m.d_expert or d,
        n_shared=m.shared,
        n_routers=config.loops if m.router_per_loop else 1,
        capacity_factor=m.capacity_factor,
        backend=m.backend,
    )
