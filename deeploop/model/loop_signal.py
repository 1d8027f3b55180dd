"""Tell the blocks which loop they run in: `model.loop_signal`.

    none       nothing
    add        the sinusoid of the loop's number is added to the stream at the start of the loop
    modulate   each sublayer's normalised input is scaled by 1 + a_t and its output by 1 + b_t,
               [d_model] each: maps of the sinusoid, 0 at initialisation

Sources: Universal Transformer, arXiv 1807.03819 (add); timestep-modulated loops, arXiv 2410.01405
(modulate: no shift; there the factors are a_t and b_t alone, so that blocks start as identities,
here they start as the model without the signal).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig

PERIOD = 10000.0  # longest period of the sinusoid, in loops, over 2 pi


def sinusoid(loop: int, width: int, like: Tensor) -> Tensor:
    """Return sines, then cosines, of a loop counted from 0: [width], dtype and device of `like`.

    Source: arXiv 1706.03762, section 3.5, for the position t = loop + 1.
    """
    half = width // 2
    k = torch.arange(half, dtype=torch.float64 if like.dtype == torch.float64 else torch.float32)
    angle = (loop + 1) * torch.exp(-math.log(PERIOD) * k / half)
    return torch.cat([angle.sin(), angle.cos()]).to(like)


class Modulation(NamedTuple):
    """Factors of one sublayer in one loop, each [d_model]."""

    scale: Tensor  # of the branch's normalised input; the norm's gain takes it
    gate: Tensor  # of the branch's output


class LoopModulation(nn.Module):
    """Map a loop's number to the factors of each sublayer of the core."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d = self.width = config.d_model
        self.hidden = nn.Linear(d, d)
        self.factors = nn.Linear(d, 2 * config.n_layers * 2 * d)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill the hidden layer; zero the factors, after every other initialisation."""
        nn.init.normal_(self.hidden.weight, std=self.width**-0.5)
        for p in (self.hidden.bias, self.factors.weight, self.factors.bias):
            p.zero_()

    def forward(self, loop: int) -> list[Modulation]:
        """Return the factors of each sublayer in a loop counted from 0."""
        hidden = F.silu(self.hidden(sinusoid(loop, self.width, self.hidden.weight)))
        factors = 1 + self.factors(hidden).view(-1, 2, self.width)
        return [Modulation(scale, gate) for scale, gate in factors]
