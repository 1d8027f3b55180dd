"""Make a small model with an optimizer state to save."""

import torch

from deeploop.config import Config, ModelConfig
from deeploop.model.looplm import LoopLM
from deeploop.train.optim import adamw


def trained_once(loops: int = 2) -> tuple[Config, LoopLM, torch.optim.Optimizer]:
    """A configuration, its model and the optimizer after one step."""
    config = Config(
        model=ModelConfig(d_model=16, n_heads=2, n_layers=1, loops=loops, vocab_size=11, seq_len=8)
    )
    model = LoopLM(config.model)
    optimizer = adamw(model, config.train)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    return config, model, optimizer
