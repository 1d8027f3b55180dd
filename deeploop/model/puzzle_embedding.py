"""A vector for each puzzle, with a sparse optimizer of its own: sign descent.

A puzzle's vector has a gradient in the few steps that draw it; Adam's moments of all the others
would be most of a run's memory, and its update of a gradient that is nearly always 0 is about the
sign. A step changes the rows of the puzzles in the batch alone,

    w <- w (1 - lr decay) - lr sign(g),    g the sum over the batch's sequences of that puzzle

The table is a buffer and not a parameter: it is saved with the weights, no other optimizer has
it, and ranks exchange the rows of the batch in the place of a dense gradient.

Source: HRM (arXiv 2506.21734), whose released code has this rule.
"""

import torch
from torch import Tensor, nn

from deeploop.utils.distributed import Ranks


class PuzzleEmbedding(nn.Module):
    """A table of vectors [puzzles, width], 0 at first."""

    weight: Tensor

    def __init__(self, puzzles: int, width: int):
        super().__init__()
        self.register_buffer("weight", torch.zeros(puzzles, width))
        self.drawn: list[tuple[Tensor, Tensor]] = []  # ids and rows of the forwards since a step

    def forward(self, puzzles: Tensor) -> Tensor:
        """Return the vectors of puzzles int64 [B]: [B, width].

        In training, with gradients on, the rows collect a gradient for `step`.
        """
        rows = self.weight[puzzles]
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            self.drawn.append((puzzles, rows))
        return rows

    @torch.no_grad()
    def step(
        self,
        lr: float,
        weight_decay: float,
        ranks: Ranks = Ranks(),  # noqa: B008
        skip: Tensor | None = None,
    ) -> None:
        """Take a step on the rows drawn since the last one, on every rank the same.

        Nothing here waits for the device. Ranks must have drawn equally many.

        Args:
            lr: step size.
            weight_decay: decoupled; it acts on the drawn rows alone.
            ranks: processes that share the batch; ids and gradients are gathered from all.
            skip: bool, a scalar on the device: leave the table as it is (a gradient that is not
                finite).
        """
        drawn = [(ids, rows.grad) for ids, rows in self.drawn]
        self.drawn.clear()
        gathered = [(ids, grad) for ids, grad in drawn if grad is not None]
        if not gathered:
            return
        ids = ranks.all_gather(torch.cat([ids for ids, _ in gathered]))
        grads = ranks.all_gather(torch.cat([grad for _, grad in gathered]))
        # A product with the matrix of equal ids sums in one order, which atomics do not, and needs
        # no number of distinct ids from the device. In float64 the order does not matter.
        same = (ids[:, None] == ids).to(torch.float64)
        sign = (same @ grads.double()).sign().to(grads.dtype)
        old = self.weight[ids]
        new = old * (1 - lr * weight_decay) - lr * sign
        self.weight[ids] = new if skip is None else torch.where(skip, old, new)
