"""loom: branches scaled by gamma, a re-injected embedding and two moving averages of attention.

With gamma = lambda / (R sqrt K), g_t = lambda / (t sqrt K) and o = gamma f:

    start of loop t > 1   h  = (1 - g_t) h + g_t e
    attention             L' = b L + o ; G' = b G + o ; h' = h + L' / D_L + G' / D_G
    MoE                   h' = h + gamma RMSNorm(f) * gain_out

L restarts in every loop, G does not; D_L and D_G are the sums of their weights. Inside a loop
only L is written (`deeploop.kernels.looping_update`): LoomMemory.global_ is then G at the end
of the loop before. With global_source = readout (the released code) G takes L' / D_L in the
place of o, and both are written at every layer.

Norms have no gain but the one after the MoE branch; the embedding is not normed but divided
by its standard deviation; the head is a separate matrix. Every component is a switch
(`LoomConfig`). Blocks before and after the loops, which the paper does not have, add gamma f;
with carry = normalised the state is normed at the start of the next loop, so not before them.

Source: LOOM, arXiv 2610.01153; gamma is the rule of arXiv 2606.18524 with lambda = 1/2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop.config import ModelConfig, scaling
from deeploop.kernels import (
    branch_sandwich,
    expert_combine,
    inject,
    looping_carry,
    looping_coefficients,
    looping_update,
    looping_update_two,
    pre_norm,
    two_memory_coefficients,
)
from deeploop.model.moe.layer import Routed, combine
from deeploop.model.residual.base import Residual
from deeploop.utils.device import autocast_dtype

if TYPE_CHECKING:
    from deeploop.model.state import LoopState, Visit


class LoomMemory(NamedTuple):
    """LOOM's two moving averages of attention outputs, each [B, T, d_model] or None at first."""

    local: Tensor | None = None  # over the layers of this loop
    global_: Tensor | None = None  # over all loops


class Loom(Residual):
    """LOOM's rule, with the switches of `ModelConfig.loom`."""

    norms_embedding = final_gain = ties_head = False
    counts_loops = True

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.loom = config.loom
        self.gamma = (
            scaling.loom_gamma(config.n_layers, config.loops, config.loom.strength)
            if config.loom.scaling
            else 1.0
        )
        self.uses_input = config.loom.injection
        self.starts_fresh = config.loom.injection or config.loom.carry == "normalised"

    def gains(self, kind: str) -> tuple[bool, bool]:
        return False, self.loom.branch_norm and kind != "attention"

    def describe(self) -> str:
        return f"gamma {self.gamma:.5f}, g_2 {self.injection(1):.4f}"

    def embed(self, x: Tensor, gain: Tensor | None) -> Tensor:
        return x / self.config.embed_std

    def injection(self, loop: int) -> float:
        """Return g_t, the embedding's weight at the start of a loop counted from 0."""
        if not self.loom.injection:
            return 0.0
        return scaling.injection_weight(loop + 1, self.config.n_layers, self.loom.strength)

    def start_loop(self, s: LoopState, e: Tensor, visit: Visit) -> LoopState:
        h, n, gain = s.h, s.n, visit.gain_in
        assert visit.loop is not None
        if visit.loop and self.loom.carry == "normalised":
            h, n = F.rms_norm(h, h.shape[-1:], eps=self.eps), None
        g = self.injection(visit.loop)
        if g:
            h, n = inject(h, e, gain, 1 - g, g, self.eps)
        elif n is None:
            n = F.rms_norm(h, h.shape[-1:], gain, self.eps)
        memory = LoomMemory(None, self._global_memory(s))
        return s._replace(h=h, n=n.to(autocast_dtype(h)), memory=memory)

    def detach(self, s: LoopState) -> LoopState:
        memory = self._global_memory(s)
        return type(s)(
            s.h.detach(), memory=LoomMemory(None, None if memory is None else memory.detach())
        )

    def _global_memory(self, s: LoopState) -> Tensor | None:
        """Return G at the end of a loop; the closed form makes it here, once per loop."""
        local, global_ = s.memory or LoomMemory()
        if local is None or self.loom.global_source == "readout":
            return global_
        return looping_carry(global_, local, self.config.n_layers, self.loom.decay)

    def __call__(self, s: LoopState, f: Tensor | Routed, visit: Visit) -> LoopState:
        if self._averages(visit):
            assert isinstance(f, Tensor)
            return self._attention(s, f, visit)
        gain, after = visit.sublayer.gain_out, visit.next_gain
        if gain is None:
            h, n = pre_norm(s.h, combine(f), after, self.gamma, self.eps, norm=visit.norm)
        elif isinstance(f, Routed):
            h, n = expert_combine(
                s.h, f.expert_out, f.slots, f.weights, f.shared, gain, after, self.gamma, self.eps,
                visit.norm,
            )  # fmt: skip
        else:
            h, n = branch_sandwich(s.h, f, gain, after, self.gamma, self.eps, norm=visit.norm)
        return s._replace(h=h, n=n)

    def _averages(self, visit: Visit) -> bool:
        """Return whether a visit's output goes through the two moving averages."""
        looped = visit.loop is not None
        return looped and self.loom.looping_residual and visit.sublayer.kind == "attention"

    def _attention(self, s: LoopState, f: Tensor, visit: Visit) -> LoopState:
        """Update the averages of attention and the stream in one kernel."""
        decay, two = self.loom.decay, self.loom.global_source == "readout"
        factors = two_memory_coefficients if two else looping_coefficients
        read_local, read_global = factors(*self._position(visit), self.config.n_layers, decay)
        before = s.memory or LoomMemory()
        dtype = torch.promote_types(s.h.dtype, torch.float32)
        scales: dict[str, Any] = {
            "scale": self.gamma, "decay": decay, "read_local": read_local,
            "read_global": read_global, "eps": self.eps, "memory_dtype": dtype,
        }  # fmt: skip
        if two:
            h, local, global_, n = looping_update_two(
                s.h, f, before.local, before.global_, visit.next_gain,
                source="readout", norm=visit.norm, **scales,
            )  # fmt: skip
            return s._replace(h=h, n=n, memory=LoomMemory(local, global_))
        h, local, n = looping_update(
            s.h, f, before.local, before.global_, visit.next_gain, norm=visit.norm, **scales
        )
        return s._replace(h=h, n=n, memory=LoomMemory(local, before.global_))

    def _position(self, visit: Visit) -> tuple[int, int]:
        """Return the loop and the attention layer, both counted from 1 as in the formulas."""
        assert visit.loop is not None
        return visit.loop + 1, visit.sublayer_index // 2 + 1

    # The paper's two-memory form, in plain PyTorch.

    def start_reference(self, s: LoopState, e: Tensor, loop: int) -> LoopState:
        h, g = s.h, self.injection(loop)
        if loop and self.loom.carry == "normalised":
            h = F.rms_norm(h, h.shape[-1:], eps=self.eps)
        return s._replace(
            h=(1 - g) * h + g * e, memory=LoomMemory(None, (s.memory or LoomMemory()).global_)
        )

    def reference(self, s: LoopState, f: Tensor, visit: Visit) -> LoopState:
        if not self._averages(visit):
            if visit.sublayer.gain_out is not None:
                f = F.rms_norm(f, f.shape[-1:], visit.sublayer.gain_out, self.eps)
            return s._replace(h=s.h + self.gamma * f)
        b, o = self.loom.decay, self.gamma * f
        local, global_ = (0.0 if x is None else x for x in s.memory or LoomMemory())
        read_local, read_global = two_memory_coefficients(
            *self._position(visit), self.config.n_layers, b
        )
        local = b * local + o
        fed = local * read_local if self.loom.global_source == "readout" else o
        global_ = b * global_ + fed
        h = s.h + read_local * local + read_global * global_
        return s._replace(h=h, memory=LoomMemory(local, global_))
