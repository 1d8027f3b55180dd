"""LOOM's configurations for tests."""

import dataclasses

import torch

from deeploop.config import LoomConfig, ModelConfig, MoEConfig
from deeploop.model.looplm import LoopLM
from tests.helpers.plain_model import EPS, ROPE_BASE, scattered


def small(loom=None, moe=None, **changes) -> ModelConfig:
    base = ModelConfig(
        residual="loom",
        d_model=16,
        n_layers=2,
        loops=3,
        n_heads=2,
        vocab_size=31,
        seq_len=16,
        norm_eps=EPS,
        rope_base=ROPE_BASE,
        embed_std=0.25,
        loom=LoomConfig(**(loom or {})),
        moe=MoEConfig(
            **{"experts": 4, "top_k": 2, "d_expert": 8, "shared": 2, "capacity_factor": 0.0}
            | (moe or {})
        ),
    )
    return dataclasses.replace(base, **changes)


def build(config: ModelConfig, seed: int = 0) -> LoopLM:
    """A float64 model in which no two routers, gains or biases are alike."""
    torch.manual_seed(seed)
    return scattered(LoopLM(config))
