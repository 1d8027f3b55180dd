"""Make a small model with an optimizer state to save."""

import hashlib
import json
from pathlib import Path

import torch

from deeploop.config import Config, ModelConfig
from deeploop.model.looplm import LoopLM
from deeploop.train.optim import make_optimizer


def trained_once(loops: int = 2) -> tuple[Config, LoopLM, torch.optim.Optimizer]:
    """A configuration, its model and the optimizer after one step."""
    config = Config(
        model=ModelConfig(d_model=16, n_heads=2, n_layers=1, loops=loops, vocab_size=11, seq_len=8)
    )
    model = LoopLM(config.model)
    optimizer = make_optimizer(model, config.train)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    optimizer.step()
    return config, model, optimizer


def sign(path: Path) -> None:
    """Make a checkpoint's checksums fit its files, as someone who writes a hostile one would."""
    state = json.loads((path / "state.json").read_text())
    state["sha256"] = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in path.iterdir()
        if file.name != "state.json"
    }
    (path / "state.json").write_text(json.dumps(state))
