"""An embedding for each puzzle, trained by sign-SGD on the rows of a batch alone.

    w <- (1 - lr decay) w - lr sign(sum of the gradients of w in the batch)

A row is updated only in the steps whose batch has its puzzle: a table of a million puzzles needs
neither a dense gradient nor moments. It is a buffer, so that AdamW and gradient sums leave it out
and checkpoints have it. Source: HRM's code (`CastedSparseEmbedding`), which TRM takes over.
"""

import torch
from torch import Tensor, nn

from deeploop.utils.distributed import Ranks


class PuzzleEmbedding(nn.Module):
    """A table of `puzzles` rows of `tokens` * d_model values, zero at first."""

    weight: Tensor  # float32 [puzzles, tokens * d_model]

    def __init__(self, puzzles: int, tokens: int, d_model: int):
        super().__init__()
        self.tokens, self.d_model = tokens, d_model
        self.register_buffer("weight", torch.zeros(puzzles, tokens * d_model))
        self.used: list[tuple[Tensor, Tensor]] = []  # ids and rows since the last step

    def forward(self, puzzles: Tensor) -> Tensor:
        """Look up puzzles int64 [B] -> [B, tokens, d_model]; with gradient, `step` reads it."""
        rows = self.weight[puzzles]
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self.used.append((puzzles, rows))
        return rows.view(-1, self.tokens, self.d_model)

    @torch.no_grad()
    def step(self, lr: float, decay: float, finite: Tensor, ranks: Ranks = Ranks()) -> None:  # noqa: B008
        """Update the rows looked up since the last step, from their gradients on all ranks.

        Args:
            lr, decay: of the formula above.
            finite: bool scalar on the device; where it is false, nothing changes.
            ranks: processes that share the batch; each updates its copy alike.
        """
        used = [(ids, rows.grad) for ids, rows in self.used if rows.grad is not None]
        self.used.clear()
        if not used:
            return
        ids = ranks.join_rows(torch.cat([i for i, _ in used]))
        gradients = ranks.join_rows(torch.cat([g for _, g in used if g is not None]))
        ids, order = ids.sort(stable=True)
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[1:] = ids[1:] != ids[:-1]
        group = starts.cumsum(0) - 1  # equal puzzles have one gradient, their sum
        summed = torch.zeros_like(gradients).index_add_(0, group, gradients[order])
        old = self.weight[ids]
        new = old * (1 - lr * decay) - lr * summed.sign()[group]
        self.weight[ids] = torch.where(finite, new, old)  # equal rows are written alike
