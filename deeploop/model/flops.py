"""What training costs: FLOPs of a model, and the peaks of the devices it may run on.

Model FLOPs are those of the matrix products that the loss needs: loops as they run, the
head once for each loss, attention over all T x T pairs, no recomputation. A token of a
model of V x d embedding, R loops over K blocks of width d and T tokens a sequence costs

    6 V d + R K (6 * weights of a block + 12 d T)       weights that the token meets

forward and backward together; MFU is that over the device's peak.
"""

from deeploop.config import Config, ModelConfig
from deeploop.config.backprop import segments


def block_weights(m: ModelConfig) -> int:
    """Weights of one block's matrices that a token meets in a visit."""
    d, e = m.d_model, m.moe
    if not e.experts:
        return 4 * d * d + 3 * d * m.ff_width
    return 4 * d * d + 3 * d * (e.d_expert or d) * (e.top_k + e.shared) + e.experts * d


def forward_flops(m: ModelConfig, loops: int) -> float:
    """Forward FLOPs of one token through some loops, without the head."""
    return loops * m.n_layers * (2 * block_weights(m) + 4 * m.d_model * m.seq_len)


def weight_flops(m: ModelConfig) -> float:
    """FLOPs of a token as 6 for each weight it meets, in every loop; attention left out."""
    return 6 * (m.vocab_size * m.d_model + m.loops * m.n_layers * block_weights(m))


def flops_per_token(config: Config) -> float:
    """Model FLOPs of one token of one batch: forward and, where the plan goes, backward.

    Loops that the plan runs without gradient count their forward alone; under `segments`
    each segment's loss is a pass through the head.
    """
    m = config.model
    head = 2 * m.vocab_size * m.d_model
    return sum(
        forward_flops(m, len(s.ahead)) + 3 * (forward_flops(m, len(s.loops)) + head)
        for s in segments(config.train, m.loops)
    )
