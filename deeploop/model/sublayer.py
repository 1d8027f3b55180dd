"""A physical sublayer: one branch, and the gains of the norms before and after it."""

from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.model.attention import Attention
from deeploop.model.mlp import SwiGLU
from deeploop.model.moe.layer import MoE
from deeploop.model.residual import Residual

KINDS = {Attention: "attention", SwiGLU: "mlp", MoE: "experts"}


class Sublayer(nn.Module):
    """A branch with the gains of its norms; every visit shares all three.

    `norm_in.weight` [d_model] is the gain of the norm before the branch, `norm_out.weight`
    [d_model] that of the norm after it (`Residual.gains` says which exist). The norms
    themselves run inside the residual rule's kernels.
    """

    def __init__(self, branch: Attention | SwiGLU | MoE, d_model: int, rule: Residual):
        super().__init__()
        before, after = rule.gains(KINDS[type(branch)])
        self.norm_in = nn.RMSNorm(d_model) if before else None
        self.norm_out = nn.RMSNorm(d_model) if after else None
        self.branch = branch

    @property
    def kind(self) -> str:
        """The branch's component of a step: attention, mlp or experts (`utils.spans`)."""
        return KINDS[type(self.branch)]

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
    attention = Attention(d, config.n_heads, config.qk_norm, config.norm_eps)
    return [Sublayer(attention, d, rule), Sublayer(_feed_forward(config, looped), d, rule)]


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
