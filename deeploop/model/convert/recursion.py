"""Turn a trained model without loops into a looped one: a Relaxed Recursive Transformer.

Of L blocks, K = L / R become the shared ones, and block l (from 0) of the old model is visit
(loop l div K, block l mod K) of the new one. A shared matrix W' starts as that of some of the old
blocks (`INITS`); with a rank above 0, each loop's adapter starts from the truncated singular value
decomposition of what W' lacks:

    W diag(g) - W' = U S V^T,    B = U_r S_r,    A = V_r^T

where g is the gain of the norm before the branch, for the matrices that read that norm, else 1. The
old blocks' gains differ and the new ones are shared, so they move into the matrices and start at 1
again: then the new model with adapters of full rank is the old one exactly, whatever the gains are.

Source: Relaxed Recursive Transformers, arXiv 2410.20672 (inits, adapters from the decomposition).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from deeploop.config import ModelConfig
from deeploop.config.fields import check_choice
from deeploop.model.lora import adapter_rank
from deeploop.model.residual import residual_rule
from deeploop.utils.errors import InputError

READ_NORM = ("qkv", "gate_up")  # the matrices whose input is the norm before the branch


def stepwise(block: int, n_blocks: int, loops: int) -> Sequence[int]:
    """Blocks at equal intervals, the first and the last among them; of a single one the first."""
    return [block * (n_blocks * loops - 1) // max(1, n_blocks - 1)]


def average(block: int, n_blocks: int, loops: int) -> Sequence[int]:
    """The mean of all blocks that become this one."""
    return range(block, n_blocks * loops, n_blocks)


def lower(block: int, n_blocks: int, loops: int) -> Sequence[int]:
    """The first blocks."""
    return [block]


# By name, the old blocks whose mean a shared one starts as: (shared block, K, R) -> old blocks.
INITS: dict[str, Callable[[int, int, int], Sequence[int]]] = {
    "stepwise": stepwise,
    "average": average,
    "lower": lower,
}


@torch.no_grad()
def looped_from(
    weights: Mapping[str, Tensor],
    config: ModelConfig,
    loops: int,
    init: str = "stepwise",
    rank: int = 0,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Return the configuration and the state dict of a looped model made from one without loops.

    Args:
        weights: state dict of the model without loops.
        config: its configuration, with loops = 1.
        loops: R; it must divide the blocks.
        init: of `INITS`.
        rank: of the adapters; 0: none, d_model: full, so that the outputs stay the same.

    Raises:
        InputError: the model has loops already, `loops` does not divide its blocks, its residual
            rule or another field does not allow it, or the rank is refused.
    """
    check_choice("init", init, INITS)
    looped = looped_config(config, loops, rank)
    n_blocks = looped.n_layers
    made = {name: w.clone() for name, w in weights.items() if not name.startswith("sublayers.")}
    matrices = [_matrices(weights, i) for i in range(2 * config.n_layers)]
    for j in range(2 * n_blocks):
        block, kind = divmod(j, 2)
        chosen = [matrices[2 * i + kind] for i in INITS[init](block, n_blocks, loops)]
        of_loops = matrices[j :: 2 * n_blocks]
        gain = weights.get(f"sublayers.{j}.norm_in.weight")
        if gain is not None:
            made[f"sublayers.{j}.norm_in.weight"] = torch.ones_like(gain)
        for name, like in _stored(weights, j).items():
            shared = torch.stack([matrix[name] for matrix in chosen]).mean(0).to(like.dtype)
            made[f"sublayers.{j}.branch.{name}.weight"] = shared
            for loop, matrix in enumerate(of_loops if rank else ()):
                a, b = truncated(matrix[name] - shared, adapter_rank(rank, *like.shape))
                made[f"sublayers.{j}.adapters.{name}.a.{loop}"] = a.to(like.dtype)
                made[f"sublayers.{j}.adapters.{name}.b.{loop}"] = b.to(like.dtype)
    return looped, made


def looped_config(config: ModelConfig, loops: int, rank: int) -> ModelConfig:
    """Return the looped model's configuration; raises InputError as `looped_from` does."""
    if config.loops > 1:
        raise InputError(
            f"model.loops={config.loops}: the model has loops already; give one with model.loops=1"
        )
    if loops < 2 or config.n_layers % loops:
        raise InputError(
            f"loops={loops}: must be 2 or more and divide the model's {config.n_layers} blocks"
        )
    if config.moe.experts:
        raise InputError(
            f"model.moe.experts={config.moe.experts}: experts of several blocks cannot become "
            "those of one; give a model with a dense SwiGLU"
        )
    rule = residual_rule(config)
    if rule.counts_loops or any(rule.gains(kind)[1] for kind in ("attention", "mlp")):
        raise InputError(
            f"model.residual={config.residual}: depends on the loop's number or has gains after a "
            "branch, which no matrix can take up; give a model of another rule, such as pre_norm"
        )
    for name, allowed in (
        ("inject", ("none",)),
        ("loop_norm", ("none", "last")),
        ("loop_signal", ("none",)),
        ("depth", ("fixed",)),
        ("lora_rank", (0,)),
    ):
        if (value := getattr(config, name)) not in allowed:
            raise InputError(
                f"model.{name}={value}: a looped model cannot start as this one, as it would act "
                f"in every loop; give a model with model.{name}={allowed[0]}"
            )
    return dataclasses.replace(
        config, n_layers=config.n_layers // loops, loops=loops, lora_rank=rank
    )


def _stored(weights: Mapping[str, Tensor], sublayer: int) -> dict[str, Tensor]:
    """Return the matrices of a sublayer's branch by their names."""
    prefix, suffix = f"sublayers.{sublayer}.branch.", ".weight"
    return {
        key.removeprefix(prefix).removesuffix(suffix): w
        for key, w in weights.items()
        if key.startswith(prefix)
    }


def _matrices(weights: Mapping[str, Tensor], sublayer: int) -> dict[str, Tensor]:
    """Return a sublayer's matrices by name in float64, with the gain of the norm before it."""
    gain = weights.get(f"sublayers.{sublayer}.norm_in.weight")
    return {
        name: w.double() if gain is None or name not in READ_NORM else w.double() * gain
        for name, w in _stored(weights, sublayer).items()
    }


def truncated(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A [rank, in] and B [out, rank] with B A the nearest to `matrix` [out, in]."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return v[:rank].contiguous(), u[:, :rank] * s[:rank]
