"""Training steps as the trainer takes them, on tokens made up here."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from bench.record import Work
from deeploop.config import Config
from deeploop.config.backprop import rounds
from deeploop.model.flops import flops_per_token
from deeploop.model.looplm import LoopLM, count_parameters
from deeploop.model.moe.layer import MoE, update_router_bias_
from deeploop.model.visits import LoopState
from deeploop.train.backprop import backward
from deeploop.train.optim import adamw, clip_gradients, step_if_finite


class Training(NamedTuple):
    """A model, its optimizer and one batch."""

    config: Config
    model: LoopLM
    optimizer: torch.optim.AdamW
    tokens: Tensor  # int64 [batch, seq_len]
    targets: Tensor  # the same

    def held(self) -> list[Tensor]:
        """What stays from step to step."""
        states = self.optimizer.state.values()
        moments = [x for state in states for x in state.values() if isinstance(x, Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *moments, *self[3:]]

    def held_bytes(self) -> int:
        return sum(x.nbytes for x in self.held())

    def work(self) -> Work:
        """Of a step: model FLOPs, and the least traffic of float32 weights.

        Forward reads each weight, backward writes its gradient, AdamW reads the weight, the
        gradient and two moments and writes all but the gradient; activations not counted.
        """
        passes = 1 + 1 + 4 + 3
        updates = len(rounds(self.config.train, self.config.model.loops))
        floor = updates * passes * 4 * count_parameters(self.model)
        tokens = self.tokens.numel()
        return Work(floor, tokens * flops_per_token(self.config), tokens)

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix products."""
        return torch.bfloat16 if self.config.train.precision == "bf16" else torch.float32


def training(config: Config, device: torch.device) -> Training:
    """A fresh model of seed 0, and random tokens."""
    m = config.model
    torch.manual_seed(0)
    model = LoopLM(m).to(device)
    shape = (config.train.batch_size, m.seq_len)
    tokens, targets = (torch.randint(0, m.vocab_size, shape, device=device) for _ in range(2))
    return Training(config, model, adamw(model, config.train), tokens, targets)


def take_step(t: Training) -> Tensor:
    """What `Trainer.step` does with a batch of one micro-batch; returns its last loss."""
    carried: LoopState | None = None
    loads: list[Tensor] = []
    for part in rounds(t.config.train, t.config.model.loops):
        for segment in part:
            piece = backward(t.model, t.config, segment, t.tokens, t.targets, carried, None)
            carried, loads = piece.carried, [*loads, *piece.loads]
        optimize(t)
    balance(t, loads)
    return piece.loss


def optimize(t: Training) -> None:
    """Clip, step and drop the gradients; the learning rate stays at its peak."""
    step_if_finite(t.optimizer, clip_gradients(t.model, t.config.train.clip), t.config.train.lr)
    t.optimizer.zero_grad(set_to_none=True)


def balance(t: Training, loads: list[Tensor]) -> None:
    """Move the biases of the experts by the step's loads, int64 [experts] of each visit."""
    m = t.config.model
    if not loads or not m.moe.balance_lr:
        return
    by_layer = torch.stack(loads).view(-1, m.n_layers, m.moe.experts).sum(0)
    experts = [s.branch for s in t.model.sublayers if isinstance(s.branch, MoE)]
    for moe, load in zip(experts, by_layer, strict=True):
        update_router_bias_(moe.bias, load, m.moe.balance_lr)
