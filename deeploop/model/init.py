"""Initialise the weights of a LoopLM, and draw truncated normals."""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deeploop.model.attention import Attention
from deeploop.model.mlp import SwiGLU
from deeploop.model.moe.layer import copy_router

if TYPE_CHECKING:
    from deeploop.model.looplm import LoopLM

CUT = 2.0  # of truncated_normal_, in deviations of the normal


@torch.no_grad()
def init_weights(model: "LoopLM") -> None:
    """Fill matrices from Xavier's normal, times beta for V, O and the FFN, never for Q and K.

    beta acts here and only here. The matrices it scales and the Xavier base are DeepNet's
    (arXiv 2203.00555), as DeepLoop and LOOM do not state their initial weights. Norm gains
    start at 1, the embedding has a standard deviation of `embed_std`, an untied head and the
    first loop's router one of d_model^-1/2; the routers of the other loops start as copies of
    the first (LOOM's released code; otherwise its experts starve in late loops).
    """
    config, beta = model.config, model.rule.init_gain()
    nn.init.normal_(model.embed_tokens.weight, std=config.embed_std)
    if model.lm_head is not None:
        nn.init.normal_(model.lm_head.weight, std=config.d_model**-0.5)
    for sublayer in model.all_sublayers():
        branch = sublayer.branch
        if isinstance(branch, Attention):
            for matrix, gain in zip(branch.qkv.weight.chunk(3), (1.0, 1.0, beta), strict=True):
                _xavier_(matrix, config.d_model, config.d_model, gain)
            _xavier_(branch.out.weight, config.d_model, config.d_model, beta)
        elif isinstance(branch, SwiGLU):
            _swiglu_(
                branch.gate_up.weight, branch.out.weight, config.ff_width, config.d_model, beta
            )
        else:
            width = branch.down.shape[2]  # of each shared expert, too, though they are one SwiGLU
            _swiglu_(branch.gate_up, branch.down, width, config.d_model, beta)
            if branch.shared is not None:
                _swiglu_(
                    branch.shared.gate_up.weight,
                    branch.shared.out.weight,
                    width,
                    config.d_model,
                    beta,
                )
            for router in branch.routers:
                router.normal_(std=config.d_model**-0.5)
            if config.moe.router_copied:
                copy_router(branch)
    model.borders.init_weights()
    model.depth.init_weights()
    for sublayer in model.sublayers:  # after all others, which are then those without adapters
        for adapters in sublayer.adapters.values():
            adapters.init_weights()


def truncated_normal_(tensor: Tensor, std: float) -> None:
    """Fill a tensor from a normal that is cut at twice its deviation; the result's is `std`.

    By the inverse of the distribution function: torch's rejection reads values back, which neither
    fake nor meta tensors have.
    """
    edge = math.erf(CUT / math.sqrt(2))
    density = math.exp(-(CUT**2) / 2) / math.sqrt(2 * math.pi)
    left = math.sqrt(1 - 2 * CUT * density / edge)  # the deviation that the cut leaves of 1
    tensor.uniform_(-edge, edge).erfinv_().mul_(math.sqrt(2) * std / left)


def _swiglu_(gate_up: Tensor, down: Tensor, width: int, d_model: int, gain: float) -> None:
    for matrix in (gate_up, down):
        _xavier_(matrix, d_model, width, gain)


def _xavier_(matrix: Tensor, fan_in: int, fan_out: int, gain: float) -> None:
    matrix.normal_(std=gain * math.sqrt(2 / (fan_in + fan_out)))
