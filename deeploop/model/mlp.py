"""SwiGLU, the dense feed-forward branch of a block, and one over positions."""

import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.model.attention import AttentionContext
from deeploop.model.lora import Adapters, adapted


class SwiGLU(nn.Module):
    """out(silu(gate) * up), gate and up as one matrix [2 * d_ff, d_model]; no biases."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.out = nn.Linear(d_ff, d_model, bias=False)

    def forward(
        self,
        n: Tensor,
        context: AttentionContext | None = None,
        adapters: Adapters = (None, None),
    ) -> Tensor:
        """Map n [B, T, d_model] -> [B, T, d_model]; the context is attention's and not read."""
        gate, up = adapted(self.gate_up, n, adapters[0]).chunk(2, dim=-1)
        return adapted(self.out, F.silu(gate) * up, adapters[1])


class PositionMixer(SwiGLU):
    """A SwiGLU over the T positions of each channel, in the place of attention (TRM).

    `gate_up` is [2 * width, T] and `out` [T, width]: it takes sequences of one length alone.

    Source: TRM, arXiv 2510.04871 (an MLP-Mixer, arXiv 2105.01601).
    """

    def forward(
        self,
        n: Tensor,
        context: AttentionContext | None = None,
        adapters: Adapters = (None, None),
    ) -> Tensor:
        """Map n [B, T, d_model] -> [B, T, d_model]; the context is attention's and not read."""
        return super().forward(n.transpose(1, 2), context, adapters).transpose(1, 2)
