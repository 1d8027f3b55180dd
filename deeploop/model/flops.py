"""Count the floating-point operations of training.

Model FLOPs are those of the matrix products that the loss needs: loops as they run, the head
once for each loss, attention over all T x T pairs, no recomputation. A token of a model of
V x d embedding, R loops over K blocks of width d and T tokens a sequence costs

    6 V d + R K (6 * weights of a block + 12 d T)       weights that the token meets

forward and backward together (each block before and after the loops once more); MFU is that
over the device's peak.
"""

from collections import Counter
from collections.abc import Sequence

from deeploop.config import Config, ModelConfig
from deeploop.config.backprop import Segment, segments
from deeploop.config.depth import key_loops, loop_shares
from deeploop.config.train import LOSSES
from deeploop.model.borders import reads_input
from deeploop.model.lora import adapter_rank
from deeploop.model.residual import residual_rule

DRAWN_STEPS = 64


def block_weights(m: ModelConfig) -> int:
    """Count the weights of one looped block's matrices that a token meets in a visit."""
    d, e = m.d_model, m.moe
    if not e.experts:
        return dense_block_weights(m) + adapter_weights(m)
    return 4 * d * d + 3 * d * (e.d_expert or d) * (e.top_k + e.shared) + e.experts * d


def adapter_ranks(m: ModelConfig) -> list[tuple[tuple[int, int], int]]:
    """Return the rank of one loop's adapter of each matrix [out, in] of a looped block."""
    d, ff = m.d_model, m.ff_width
    shapes = [(3 * d, d), (d, d), (2 * ff, d), (d, ff)]
    return [(shape, adapter_rank(m.lora_rank, *shape)) for shape in shapes]


def adapter_weights(m: ModelConfig) -> int:
    """Count the weights of one loop's adapters of one looped block."""
    return sum(rank * sum(shape) for shape, rank in adapter_ranks(m))


def dense_block_weights(m: ModelConfig) -> int:
    """Count the weights of one block with a dense SwiGLU: those outside of the loops."""
    return 4 * m.d_model * m.d_model + 3 * m.d_model * m.ff_width


def forward_flops(m: ModelConfig, loops: range) -> float:
    """Count the forward FLOPs of one token through some loops, without the head.

    Where a loop of training runs a share of the tokens, this is the mean over all of them.
    """
    total, d = 0.0, m.d_model
    for loop, share in zip(loops, loop_shares(m, loops), strict=True):
        own_keys = loop < key_loops(m, loop + 1)
        rank = adapter_rank(m.lora_rank, 3 * d, d)
        weights = block_weights(m) - (0 if own_keys else 2 * d * (d + rank))
        keys = m.seq_len * (share if own_keys else 1)
        total += share * m.n_layers * (2 * weights + 4 * d * keys)
    return total


def injection_flops(m: ModelConfig, loops: range) -> float:
    """Count the forward FLOPs of one token of the injection's matrix products in some loops."""
    in_each_loop, once = {"adapter": (1, 1), "contractive": (0, 1)}.get(m.inject, (0, 0))
    return 2 * m.d_model**2 * (in_each_loop * sum(loop_shares(m, loops)) + once)


def unlooped_flops(m: ModelConfig, blocks: int) -> float:
    """Count the forward FLOPs of one token through blocks before or after the loops."""
    return blocks * (2 * dense_block_weights(m) + 4 * m.d_model * m.seq_len)


def weight_flops(m: ModelConfig) -> float:
    """Count 6 FLOPs of a token for each weight it meets, in every loop; attention left out."""
    loops = sum(loop_shares(m, range(m.loops)))
    blocks = loops * m.n_layers * block_weights(m) + (m.prelude + m.coda) * dense_block_weights(m)
    return 6 * (m.vocab_size * m.d_model + blocks)


def flops_per_token(config: Config) -> float:
    """Count the model FLOPs of one token of one batch, forward and backward.

    Loops that run without gradient count their forward alone. Each loss is a pass through the
    head and the coda; the prelude runs once, or once for each segment under a rule that injects
    its output. Where a step's loops are drawn this is the mean over the first steps.
    """
    t, loops = config.train, config.model.loops
    plans = Counter(tuple(segments(t, loops, step)) for step in range(DRAWN_STEPS))
    return sum(_flops(config, plan) * n for plan, n in plans.items()) / DRAWN_STEPS


def _flops(config: Config, plan: Sequence[Segment]) -> float:
    """Count the model FLOPs of one token under the segments of a step."""
    m, each_loop = config.model, LOSSES[config.train.loss].each_loop
    injects = reads_input(m, residual_rule(m))
    prelude = unlooped_flops(m, m.prelude)
    readout = 2 * m.d_model**2 if m.readout_map else 0
    loss = 2 * m.vocab_size * m.d_model + readout + unlooped_flops(m, m.coda)
    total = 0.0
    for s in plan:
        losses = len(s.loops) if each_loop else 1
        total += forward_flops(m, s.no_grad_loops) + 3 * (
            forward_flops(m, s.loops) + injection_flops(m, s.loops) + losses * loss
        )
        if s.no_grad_loops:
            total += prelude + injection_flops(m, s.no_grad_loops)
        if injects or (s.from_start and not s.no_grad_loops):
            total += 3 * prelude
    return total
