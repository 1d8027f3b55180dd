"""A looped Transformer as a walk over visits of physical sublayers.

A sublayer owns parameters; a visit is one use of it. The residual stream `h`
and the next sublayer's already normalised input `n` travel together, so that
each visit ends in one fused kernel: residual rule plus following norm.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.kernels import (
    branch_sandwich,
    expert_combine,
    inject,
    looping_carry,
    looping_coefficients,
    looping_update,
    looping_update_two,
    post_sandwich,
    pre_norm,
    two_memory_coefficients,
)
from deeploop.model.attention import Attention, AttentionContext
from deeploop.model.mlp import SwiGLU
from deeploop.model.moe.layer import MoE, Routed, combine


class Sublayer(nn.Module):
    """One physical sublayer: a branch, the gain in front of it, the gain behind it.

    `gain_in` [d_model] belongs to the norm in front of the branch; LOOM's have none.
    `gain_out` [d_model] belongs to the norm behind it: on the residual sum (deepnorm,
    deeploop) or on the branch alone (LOOM's MoE). Every visit shares both.
    """

    def __init__(self, branch: Attention | SwiGLU | MoE, config: ModelConfig):
        super().__init__()
        self.branch = branch
        loom, d = config.residual == "loom", config.d_model
        behind = config.residual in ("deepnorm", "deeploop") or (
            loom and config.loom.branch_norm and not isinstance(branch, Attention)
        )
        self.gain_in = None if loom else nn.Parameter(torch.ones(d))
        self.gain_out = nn.Parameter(torch.ones(d)) if behind else None


class Visit(NamedTuple):
    """One use of a sublayer, and the norm that follows it in the walk."""

    loop: int  # from 0
    sublayer_index: int  # which of the 2K physical sublayers
    sublayer: Sublayer
    gain_next: Tensor | None  # [d_model]; None: all ones
    norm: bool = True  # whether a norm follows; not where the loop after begins with one

    @property
    def part(self) -> str:
        """What a profiler calls the branch (`deeploop.utils.spans.COMPONENTS`)."""
        return {Attention: "attention", SwiGLU: "mlp", MoE: "experts"}[type(self.sublayer.branch)]

    def branch(self, n: Tensor, place: AttentionContext) -> "Tensor | Routed":
        """The sublayer's branch on its normalised input [B, T, d_model]."""
        branch = self.sublayer.branch
        # A matrix, not the loop's number: a compiled branch serves every loop.
        if isinstance(branch, MoE):
            return branch(n, branch.router(self.loop))
        return branch(n, place)


class LoopState(NamedTuple):
    """What travels from visit to visit."""

    h: Tensor  # [B, T, d_model] residual stream
    n: Tensor | None = None  # [B, T, d_model] the next visit's normalised input
    local: Tensor | None = None  # LOOM: average of attention over the layers of this loop
    glob: Tensor | None = None  # LOOM: ... over all loops; in closed form, as the loop began
    z: Tensor | None = None  # sum over MoE visits of their router's mean logsumexp^2
    loads: tuple[Tensor, ...] = ()  # of each MoE visit: int64 [experts], tokens routed there


def renews(config: ModelConfig) -> bool:
    """Whether a loop begins with a new stream, and so with a norm of its own."""
    return config.residual == "loom" and (
        config.loom.injection or config.loom.carry == "normalised"
    )


def walk(
    config: ModelConfig,
    sublayers: Sequence[Sublayer],
    loop: int,
    last: bool,
    final_gain: Tensor | None,
) -> Iterator[Visit]:
    """Every visit of one loop, in order; behind the last loop comes the model's final norm."""
    for index, sublayer in enumerate(sublayers[:-1]):
        yield Visit(loop, index, sublayer, sublayers[index + 1].gain_in)
    gain_next = final_gain if last else sublayers[0].gain_in
    yield Visit(loop, index + 1, sublayers[-1], gain_next, norm=last or not renews(config))


def open_loop(
    config: ModelConfig, s: LoopState, x: Tensor, loop: int, gain: Tensor | None, dtype: torch.dtype
) -> LoopState:
    """From the end of one loop (or from the embedding x) to the first visit of loop `loop`.

        LOOM   h = (1 - g_t) h + g_t x ; n = RMS(h) * gain    g_1 = 0
        else   h stays

    A segment's first loop has h alone and norms it here.
    """
    h, n, eps = s.h, s.n, config.norm_eps
    if loop and config.residual == "loom" and config.loom.carry == "normalised":
        h, n = F.rms_norm(h, h.shape[-1:], eps=eps), None
    g = config.injection(loop)
    if g:
        h, n = inject(h, x, gain, 1 - g, g, eps)
    elif n is None:
        n = F.rms_norm(h, h.shape[-1:], gain, eps)
    return s._replace(h=h, n=n.to(dtype), local=None, glob=_memory(config, s))


def cut(config: ModelConfig, s: LoopState) -> LoopState:
    """What crosses a segment boundary: the stream and the global memory, without gradient."""
    glob = _memory(config, s)
    return LoopState(s.h.detach(), glob=None if glob is None else glob.detach())


def _memory(config: ModelConfig, s: LoopState) -> Tensor | None:
    """The global memory at the end of a loop; in closed form it is made here."""
    if s.local is None or config.loom.global_source == "readout":
        return s.glob
    return looping_carry(s.glob, s.local, config.n_layers, config.loom.decay)


def update(config: ModelConfig, s: LoopState, f: Tensor | Routed, visit: Visit) -> LoopState:
    """Add the branch output f to the stream by the residual's rule, then norm for the next visit.

    h [B, T, d_model] keeps its dtype; the new n has f's dtype.

        baseline           h' = h + f
        deepnorm, deeploop h' = RMS(alpha h + f) * gain_out
        loom, attention    h' = h + L/D_L + G/D_G           L takes gamma f, and so does G
        loom, MoE          h' = h + gamma RMS(f) * gain_out
        all                n  = RMS(h') * gain_next
    """
    if isinstance(f, Routed):
        z = f.z if s.z is None else s.z + f.z
        s = s._replace(z=z, loads=(*s.loads, f.load))
    if config.residual == "loom":
        return _loom_update(config, s, f, visit)
    y, eps = combine(f) if isinstance(f, Routed) else f, config.norm_eps
    if config.residual == "pre_norm":
        h, n = pre_norm(s.h, y, visit.gain_next, eps=eps)
    else:
        h, n = post_sandwich(s.h, y, visit.sublayer.gain_out, visit.gain_next, config.alpha, eps)
    return s._replace(h=h, n=n)


def _loom_update(config: ModelConfig, s: LoopState, f: Tensor | Routed, visit: Visit) -> LoopState:
    gamma, eps, gain = config.gamma, config.norm_eps, visit.sublayer.gain_out
    after = visit.gain_next
    attention = isinstance(visit.sublayer.branch, Attention)
    if attention and config.loom.looping_residual:
        assert isinstance(f, Tensor)
        return _remember(config, s, f, visit)
    if attention or not config.loom.branch_norm:
        y = combine(f) if isinstance(f, Routed) else f
        h, n = pre_norm(s.h, y, after, gamma, eps, norm=visit.norm)
    elif isinstance(f, Routed):
        h, n = expert_combine(
            s.h, f.rows, f.slots, f.weights, f.shared, gain, after, gamma, eps, visit.norm
        )
    else:
        h, n = branch_sandwich(s.h, f, gain, after, gamma, eps, norm=visit.norm)
    return s._replace(h=h, n=n)


def _remember(config: ModelConfig, s: LoopState, f: Tensor, visit: Visit) -> LoopState:
    """LOOM's attention branch: see `deeploop.kernels.looping_update`."""
    source, decay = config.loom.global_source, config.loom.decay
    where = (visit.loop + 1, visit.sublayer_index // 2 + 1, config.n_layers, decay)
    memory_dtype = torch.promote_types(s.h.dtype, torch.float32)
    if source == "readout":
        read_local, read_global = two_memory_coefficients(*where)
        h, local, glob, n = looping_update_two(
            s.h, f, s.local, s.glob, visit.gain_next, scale=config.gamma, decay=decay,
            read_local=read_local, read_global=read_global, source=source,
            eps=config.norm_eps, memory_dtype=memory_dtype,
        )  # fmt: skip
        return s._replace(h=h, n=n, local=local, glob=glob)
    read_local, read_global = looping_coefficients(*where)
    h, local, n = looping_update(
        s.h, f, s.local, s.glob, visit.gain_next, scale=config.gamma, decay=decay,
        read_local=read_local, read_global=read_global,
        eps=config.norm_eps, memory_dtype=memory_dtype,
    )  # fmt: skip
    return s._replace(h=h, n=n, local=local)
