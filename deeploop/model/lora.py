"""LoRA of looped matrices: each loop adds a low-rank matrix of its own to the shared one.

For loop t and a matrix W [out, in] of a looped block:

    y = x W^T + (x A_t^T) B_t^T          A_t [rank, in], B_t [out, rank]

Every matrix that a block stores has its adapters: queries, keys and values are one matrix
[3 * d_model, d_model] and have one adapter, gate and up of a SwiGLU likewise. One pair of products
then serves all rows, and the truncated SVD of their residual (`deeploop.model.convert`) is the best
of its rank for the rows together; three adapters of the same rank would read x three times.

Source: Relaxed Recursive Transformers, arXiv 2410.20672; LoRA, arXiv 2106.09685.
"""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn, zeros


class Adapter(NamedTuple):
    """A low-rank addition B A to a matrix [out, in]."""

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


# Of the first and the second matrix of a branch in one loop; None: nothing is added.
Adapters = tuple[Adapter | None, Adapter | None]


def adapted(linear: nn.Linear, x: Tensor, adapter: Adapter | None) -> Tensor:
    """Apply a matrix and its adapter: x [..., in] -> [..., out]."""
    y = linear(x)
    return y if adapter is None else y + F.linear(F.linear(x, adapter.a), adapter.b)


def adapter_rank(rank: int, out_features: int, in_features: int) -> int:
    """Return the rank of a matrix's adapters: `rank`, or the full one where that is less."""
    return min(rank, out_features, in_features)


class LoopAdapters(nn.Module):
    """The adapters of one matrix, one for each loop.

    `a` and `b` are lists of separate parameters, so that the backward of some loops leaves the
    others' gradients None.
    """

    def __init__(self, linear: nn.Linear, loops: int, rank: int):
        super().__init__()
        n_out, n_in = linear.weight.shape
        rank = adapter_rank(rank, n_out, n_in)
        self.a = nn.ParameterList(zeros(rank, n_in) for _ in range(loops))
        self.b = nn.ParameterList(zeros(n_out, rank) for _ in range(loops))

    def init_weights(self) -> None:
        """Draw each A with a standard deviation of in^-1/2 and set each B to 0: nothing is added.

        LoRA's start, A random and B zero; with this deviation x A^T has the mean square of x.
        """
        for a, b in zip(self.a, self.b, strict=True):
            nn.init.normal_(a, std=a.shape[1] ** -0.5)
            nn.init.zeros_(b)

    def of_loop(self, loop: int) -> Adapter:
        """Return the adapter of a loop counted from 0; loops past the last take the last one."""
        t = min(loop, len(self.a) - 1)
        return Adapter(self.a[t], self.b[t])
