"""gate: every token takes part in every loop, and a gate gives its exit probability after each.

With logits g_t after loop t and lambda_t = sigmoid(g_t), the probability of leaving there is

    p_t = lambda_t * product over j < t of (1 - lambda_j)        the last loop takes the rest

Sources: Ouro, arXiv 2510.25741; PonderNet, arXiv 2107.05407.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.model.depth.base import Depth

if TYPE_CHECKING:
    from deeploop.model.state import LoopState


class ExitGate(Depth):
    """A linear map of the normalised state after a loop to the logit of leaving there.

    It starts at 0: probabilities of 1/2, 1/4, 1/8, ...
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        self.gate = nn.Linear(config.d_model, 1)

    @torch.no_grad()
    def init_weights(self) -> None:
        self.gate.weight.zero_()
        self.gate.bias.zero_()

    def exit_logit(self, s: LoopState) -> Tensor:
        """Return the logit of leaving after a loop, float32: state [B, T, d_model] -> [B, T]."""
        n = s.normed
        dtype = torch.promote_types(n.dtype, torch.float32)
        with torch.autocast(n.device.type, enabled=False):
            return F.linear(n.to(dtype), self.gate.weight, self.gate.bias).squeeze(-1)


def log_exit_distribution(logits: Tensor) -> Tensor:
    """Return log p_t of leaving after each loop: logits [R, ...] -> [R, ...]; p sums to 1."""
    stay = F.logsigmoid(-logits[:-1]).cumsum(0)  # log of the products up to each loop
    before = torch.cat([torch.zeros_like(logits[:1]), stay])
    leave = torch.cat([F.logsigmoid(logits[:-1]), torch.zeros_like(logits[:1])])
    return before + leave
