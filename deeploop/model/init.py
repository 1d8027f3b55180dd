"""Initialise the weights of a LoopLM."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.model.attention import Attention
from deeploop.model.mlp import SwiGLU
from deeploop.model.moe.layer import copy_router

if TYPE_CHECKING:
    from deeploop.model.looplm import LoopLM


@torch.no_grad()
def init_weights(model: "LoopLM") -> None:
    """Xavier-normal matrices, with gain beta on V, O and the FFN, never on Q and K.

    beta acts here and only here. The matrices it scales and the Xavier base are
    DeepNet's (arXiv 2203.00555): what DeepLoop and LOOM start from they leave unstated.
    Norm gains start at 1, the embedding at `embed_std`, an untied head and the first loop's
    router at d_model^-1/2, the routers of the other loops as copies of it (LOOM's released
    code; its experts would else starve in late loops).
    """
    config = model.config
    nn.init.normal_(model.embedding.weight, std=config.embed_std)
    if model.untied is not None:
        nn.init.normal_(model.untied.weight, std=config.d_model**-0.5)
    for sublayer in model.sublayers:
        branch = sublayer.branch
        if isinstance(branch, Attention):
            for matrix, gain in zip(
                branch.qkv.weight.chunk(3), (1.0, 1.0, config.beta), strict=True
            ):
                _xavier_(matrix, config.d_model, config.d_model, gain)
            _xavier_(branch.out.weight, config.d_model, config.d_model, config.beta)
        elif isinstance(branch, SwiGLU):
            _swiglu_(branch.gate_up.weight, branch.out.weight, config.ff_width, config)
        else:
            width = branch.down.shape[2]  # of the shared experts, too, though they are one SwiGLU
            _swiglu_(branch.gate_up, branch.down, width, config)
            if branch.shared is not None:
                _swiglu_(branch.shared.gate_up.weight, branch.shared.out.weight, width, config)
            for router in branch.routers:
                router.normal_(std=config.d_model**-0.5)
            if config.moe.router_copied:
                copy_router(branch)


def _swiglu_(gate_up: Tensor, down: Tensor, width: int, config: ModelConfig) -> None:
    for matrix in (gate_up, down):
        _xavier_(matrix, config.d_model, width, config.beta)


def _xavier_(matrix: Tensor, fan_in: int, fan_out: int, gain: float) -> None:
    matrix.normal_(std=gain * math.sqrt(2 / (fan_in + fan_out)))
