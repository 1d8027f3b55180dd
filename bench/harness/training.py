"""Training steps as the trainer takes them, on random tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bench.harness.record import Work
from deeploop.config import Config
from deeploop.config.backprop import optimizer_steps
from deeploop.model.flops import flops_per_token
from deeploop.model.looplm import LoopLM, count_parameters
from deeploop.train.optim import make_optimizer
from deeploop.train.step import train_step


class Training(NamedTuple):
    """A model, its optimizer and one batch."""

    config: Config
    model: LoopLM
    optimizer: torch.optim.AdamW
    tokens: Tensor  # int64 [batch, seq_len]
    targets: Tensor  # int64 [batch, seq_len]

    def tensors(self) -> list[Tensor]:
        """List the tensors that stay from step to step: parameters, moments, batch."""
        states = self.optimizer.state.values()
        moments = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        batch = [self.tokens, self.targets]
        return [*self.model.parameters(), *self.model.buffers(), *moments, *batch]

    def nbytes(self) -> int:
        """Count the bytes of the tensors that stay from step to step."""
        return sum(x.nbytes for x in self.tensors())

    def work(self) -> Work:
        """Count the model FLOPs and the fewest bytes of a step with float32 weights.

        Forward reads each weight, backward writes its gradient, AdamW reads the weight, the
        gradient and two moments and writes all but the gradient; activations are not counted.
        """
        passes = 1 + 1 + 4 + 3
        updates = len(optimizer_steps(self.config.train, self.config.model.loops))
        floor = updates * passes * 4 * count_parameters(self.model)
        tokens = self.tokens.numel()
        return Work(floor, tokens * flops_per_token(self.config), tokens)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix products."""
        return torch.bfloat16 if self.config.train.precision == "bf16" else torch.float32


def training(config: Config, device: torch.device) -> Training:
    """Make a model from seed 0, its optimizer, and a batch of random tokens."""
    m = config.model
    torch.manual_seed(0)
    model = LoopLM(m).to(device)
    shape = (config.train.batch_size, m.seq_len)
    tokens, targets = (torch.randint(0, m.vocab_size, shape, device=device) for _ in range(2))
    return Training(config, model, make_optimizer(model, config.train), tokens, targets)


def take_step(t: Training) -> Tensor:
    """Take the trainer's step on the batch as one micro-batch, at the peak learning rate.

    Returns:
        The last segment's loss in nats, a scalar without gradient.
    """
    batch = [(t.tokens, t.targets)]
    metrics = train_step(t.model, t.optimizer, t.config, batch, t.config.train.lr)
    return list(metrics.losses.values())[-1]
