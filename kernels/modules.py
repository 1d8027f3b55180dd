"""Each op as an nn.Module that holds its gains, for use in your own model.

    from deeploop.kernels.modules import PreNorm
    add_norm = PreNorm(768)
    h, n = add_norm(h, attention(n))

Gains start at one and are float32 unless a dtype is given; `eps`, `scale` and `alpha` are
plain attributes that may change at any time. Shapes, dtypes and errors are those of the
function of the same name in `deeploop.kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ._op import Normed
from .branch_sandwich import branch_sandwich
from .expert_combine import expert_combine
from .inject import inject
from .looping_update import looping_coefficients, looping_update
from .post_sandwich import post_sandwich
from .pre_norm import pre_norm
from .sigmoid_router import sigmoid_router


class _Update(nn.Module):
    """Base of the residual updates: width d, eps, and gains of ones by name."""

    def __init__(self, d: int, gains: tuple[str, ...], eps: float, **factory: Any) -> None:
        super().__init__()
        self.d, self.eps = d, eps
        for name in gains:
            self.register_parameter(name, nn.Parameter(torch.ones(d, **factory)))

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}"


class PostSandwich(_Update):
    """h' = RMSNorm(alpha * h + f) * w_out,  n = RMSNorm(h') * w_next.

    Args:
        d: width of the stream.
        alpha: scale of the stream, fixed by the depth the model is trained at.
        eps: added to the mean squares.
        device, dtype: of the gains w_out and w_next, [d].

    Example:
        >>> update = PostSandwich(768, alpha=2.5)
        >>> h, n = update(h, mlp(n))
    """

    w_out: Tensor
    w_next: Tensor

    def __init__(self, d: int, alpha: float, eps: float = 1e-6, **factory: Any) -> None:
        super().__init__(d, ("w_out", "w_next"), eps, **factory)
        self.alpha = alpha

    def forward(self, h: Tensor, f: Tensor) -> tuple[Tensor, Normed]:
        """Update the stream h by the branch f, both [..., d]; returns h' and n."""
        return post_sandwich(h, f, self.w_out, self.w_next, self.alpha, self.eps)


class PreNorm(_Update):
    """h' = h + scale * f,  n = RMSNorm(h') * w_next (fused_add_rms_norm).

    Args:
        d: width of the stream.
        scale: factor of the branch.
        eps: added to the mean square.
        device, dtype: of the gain w_next, [d].

    Example:
        >>> update = PreNorm(768)
        >>> h, n = update(h, mlp(n))
    """

    w_next: Tensor

    def __init__(self, d: int, scale: float = 1.0, eps: float = 1e-6, **factory: Any) -> None:
        super().__init__(d, ("w_next",), eps, **factory)
        self.scale = scale

    def forward(self, h: Tensor, f: Tensor) -> tuple[Tensor, Normed]:
        """Update the stream h by the branch f, both [..., d]; returns h' and n."""
        return pre_norm(h, f, self.w_next, self.scale, self.eps)


class BranchSandwich(_Update):
    """h' = h + scale * RMSNorm(f) * w_branch,  n = RMSNorm(h') * w_next.

    Args:
        d: width of the stream.
        scale: factor of the normed branch.
        eps: added to the mean squares.
        device, dtype: of the gains w_branch and w_next, [d].

    Example:
        >>> update = BranchSandwich(768)
        >>> h, n = update(h, mlp(n))
    """

    w_branch: Tensor
    w_next: Tensor

    def __init__(self, d: int, scale: float = 1.0, eps: float = 1e-6, **factory: Any) -> None:
        super().__init__(d, ("w_branch", "w_next"), eps, **factory)
        self.scale = scale

    def forward(self, h: Tensor, f: Tensor) -> tuple[Tensor, Normed]:
        """Update the stream h by the branch f, both [..., d]; returns h' and n."""
        return branch_sandwich(h, f, self.w_branch, self.w_next, self.scale, self.eps)


class Inject(_Update):
    """h' = keep * h + add * x,  n = RMSNorm(h') * w_next.

    Args:
        d: width of the stream.
        keep: factor of the stream.
        add: factor of the input.
        eps: added to the mean square.
        device, dtype: of the gain w_next, [d].

    Example:
        >>> start_loop = Inject(768, keep=0.9, add=0.1)
        >>> h, n = start_loop(h, embedding)
    """

    w_next: Tensor

    def __init__(
        self, d: int, keep: float = 1.0, add: float = 1.0, eps: float = 1e-6, **factory: Any
    ) -> None:
        super().__init__(d, ("w_next",), eps, **factory)
        self.keep, self.add = keep, add

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Normed]:
        """Mix the input x into the stream h, both [..., d]; returns h' and n."""
        return inject(h, x, self.w_next, self.keep, self.add, self.eps)


class LoopingUpdate(_Update):
    """LOOM's attention branch: a local and a global moving average, and the next norm.

    One module serves one attention layer in every loop. The local memory goes from layer
    to layer; at the end of a loop `looping_carry` makes the global memory.

    Args:
        d: width of the stream.
        layer: attention layer within the loop, counted from 1.
        n_layers: attention layers per loop.
        scale: factor of the branch.
        decay: factor of the memories.
        eps: added to the mean square.
        device, dtype: of the gain w_next, [d].

    Example:
        >>> update = LoopingUpdate(768, layer=1, n_layers=2, scale=0.3, decay=0.9)
        >>> h, local, n = update(h, attention(n), local, glob, loop=1)
    """

    w_next: Tensor

    def __init__(
        self,
        d: int,
        layer: int,
        n_layers: int,
        scale: float,
        decay: float,
        eps: float = 1e-6,
        **factory: Any,
    ) -> None:
        super().__init__(d, ("w_next",), eps, **factory)
        self.layer, self.n_layers = layer, n_layers
        self.scale, self.decay = scale, decay

    def forward(
        self, h: Tensor, f: Tensor, local: Tensor | None, glob: Tensor | None, loop: int
    ) -> tuple[Tensor, Tensor, Normed]:
        """Update the stream and the local memory in `loop`, counted from 1.

        local is None in the first layer of a loop, glob in the first loop. Returns h', the
        new local memory and n.
        """
        read_local, read_global = looping_coefficients(loop, self.layer, self.n_layers, self.decay)
        return looping_update(
            h, f, local, glob, self.w_next, scale=self.scale, decay=self.decay,
            read_local=read_local, read_global=read_global, eps=self.eps,
        )  # fmt: skip


class ExpertCombine(_Update):
    """Weighted sum of a token's expert outputs, normed and added to the stream, and the next norm.

    Args:
        d: width of the stream.
        scale: factor of the normed sum.
        eps: added to the mean squares.
        device, dtype: of the gains w_branch and w_next, [d].

    Example:
        >>> combine = ExpertCombine(768)
        >>> h, n = combine(h, routed, slots, weights, shared)
    """

    w_branch: Tensor
    w_next: Tensor

    def __init__(self, d: int, scale: float = 1.0, eps: float = 1e-6, **factory: Any) -> None:
        super().__init__(d, ("w_branch", "w_next"), eps, **factory)
        self.scale = scale

    def forward(
        self,
        h: Tensor,
        routed: Tensor,
        slots: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
    ) -> tuple[Tensor, Normed]:
        """Update the stream h, [..., d], by the experts' outputs; returns h' and n.

        routed is [S, d]; slots and weights [T, k] name each token's rows of it.
        """
        return expert_combine(
            h, routed, slots, weights, shared, self.w_branch, self.w_next, self.scale, self.eps
        )


class SigmoidRouter(nn.Module):
    """Choose top_k of n_experts for each token by sigmoid scores.

    Args:
        d: width of the tokens.
        n_experts: 1 to 512.
        top_k: experts per token.
        device, dtype: of `weight`, [n_experts, d], drawn with standard deviation d^-1/2, and
            of the buffer `bias`, [n_experts], zeros, which you may move to balance the load.

    Example:
        >>> router = SigmoidRouter(768, n_experts=32, top_k=4)
        >>> weights, indices, load, z = router(n)
    """

    bias: Tensor

    def __init__(self, d: int, n_experts: int, top_k: int, **factory: Any) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(n_experts, d, **factory) * d**-0.5)
        self.register_buffer("bias", torch.zeros(n_experts, **factory))

    def extra_repr(self) -> str:
        n_experts, d = self.weight.shape
        return f"{d}, n_experts={n_experts}, top_k={self.top_k}"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Route the tokens x, [..., d]; returns weights, indices, load and z."""
        return sigmoid_router(x, self.weight, self.bias, self.top_k)
