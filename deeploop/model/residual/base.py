"""The contract of a residual rule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from deeploop.config import ModelConfig
from deeploop.utils.device import autocast_dtype

if TYPE_CHECKING:
    from deeploop.model.moe.layer import Routed
    from deeploop.model.state import LoopState, Visit


class Residual(ABC):
    """A rule that adds branch outputs to the residual stream h and norms the next input n.

    A subclass states its equation twice: `__call__` on a fused kernel, and `reference` in plain
    PyTorch, from which the tests' models are made. It owns no parameters: the gains that `gains`
    asks for belong to the sublayers. alpha and similar scales come from the training
    configuration and stay the same when another number of loops is run.
    """

    norms_embedding = True  # RMSNorm with a gain on the embedding
    final_gain = True  # whether the norm before the head has a gain
    norms_input = True  # RMSNorm before each branch and before the head
    ties_head = True  # whether the head is the embedding's matrix
    uses_input = False  # whether start_loop reads the input e of the loops
    counts_loops = False  # whether the rule depends on the loop's number
    starts_fresh = False  # True if start_loop changes h: the visit before it takes no norm then

    def __init__(self, config: ModelConfig):
        self.config = config
        self.eps = config.norm_eps

    def gains(self, kind: str) -> tuple[bool, bool]:
        """Return whether the norms before and after a branch have a gain.

        Args:
            kind: attention, mlp or experts.
        """
        return True, False

    def init_gain(self) -> float:
        """Return beta, the gain on the initial V, O and FFN matrices (never on Q and K)."""
        return self.config.beta

    def describe(self) -> str:
        """Return the rule's scales for the log, such as "alpha 4.000, beta 0.1250"."""
        return ""

    def embed(self, x: Tensor, gain: Tensor | None) -> Tensor:
        """Turn embedding rows x [B, T, d_model] into the stream; gain [d_model] or None (ones)."""
        return F.rms_norm(x, x.shape[-1:], gain, self.eps) if self.norms_embedding else x

    def start_loop(self, s: LoopState, e: Tensor, visit: Visit) -> LoopState:
        """Bring the state from the end of one loop to the first visit of the next.

        Args:
            s: state at the end of the loop before, or the start state; n is None at the start
                of a segment of loops, and the norm is then taken here.
            e: input of the loops [B, T, d_model], for rules that inject it.
            visit: the first visit of the loop.

        Returns:
            The state with n [B, T, d_model] in the dtype of the branches.
        """
        n = s.n
        if n is None:
            n = self.input(s.h, visit.gain_in)
        return s._replace(n=n.to(autocast_dtype(s.h)))

    def input(self, h: Tensor, gain: Tensor | None) -> Tensor:
        """Return a branch's (or the head's) input: h [B, T, d_model] normed, times gain."""
        if self.norms_input:
            return F.rms_norm(h, h.shape[-1:], gain, self.eps)
        return h if gain is None else h * gain

    @abstractmethod
    def __call__(self, s: LoopState, f: Tensor | Routed, visit: Visit) -> LoopState:
        """Add the branch output f to the stream, then norm for the next visit, in one kernel.

        Args:
            s: state before; h [B, T, d_model] keeps its dtype.
            f: branch output [B, T, d_model], or a MoE's outputs not yet combined.
            visit: the visit, with the gain of the following norm in next_gain.

        Returns:
            The state with h' and n = RMSNorm(h') * next_gain in the dtype of f; n is None where
            visit.norm is False.
        """

    @abstractmethod
    def reference(self, s: LoopState, f: Tensor, visit: Visit) -> LoopState:
        """Add f [B, T, d_model] to s.h in plain PyTorch: `__call__` without the following norm."""

    def start_reference(self, s: LoopState, e: Tensor, loop: int) -> LoopState:
        """Start a loop (counted from 0) in plain PyTorch: `start_loop` without the norm."""
        return s

    def detach(self, s: LoopState) -> LoopState:
        """Return the state that crosses a segment boundary, without gradient; here h alone."""
        return type(s)(s.h.detach())
