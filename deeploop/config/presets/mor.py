"""Mixture-of-Recursions (arXiv 2507.10524) with expert choice."""

from deeploop.config import Config, ModelConfig, MorConfig, TrainConfig


def mor_presets() -> list[Config]:
    """List a model after the paper's 360M Llama, and one that trains on two CPU cores in minutes.

    Of the paper: pre-norm blocks, of which the first and last are not shared (middle-cycle), 3
    loops, expert choice with a linear sigmoid router, scale .1, cross-entropy of weight .001, the
    code's h + w f(h). A fit to a Llama of 32 blocks: 1 + 10 x 3 + 1 blocks, the width, heads,
    SwiGLU and vocabulary of SmolLM-360M, and capacities 1, 2/3, 1/3. Different here: as many heads
    of keys as of queries, RMSNorm on the embedding, Xavier's initial weights, no warm-up of the
    capacity. Learning rate, batch and the number of steps (10 B tokens) are ours, as is all of the
    tiny model but the rule; in its 200 steps the routers only learn to tell the choice with a
    weight of .1.
    """
    return [
        Config(
            preset="mor-tiny",
            model=ModelConfig(
                residual="pre_norm", depth="expert_choice", d_model=192, n_layers=1, loops=3,
                prelude=1, coda=1, n_heads=3, mor=MorConfig(causal_weight=0.1),
            ),
            train=TrainConfig(steps=200, lr=2e-3),
        ),
        Config(
            preset="mor-360m",
            model=ModelConfig(
                residual="pre_norm", depth="expert_choice", d_model=960, n_layers=10, loops=3,
                prelude=1, coda=1, n_heads=15, d_ff=2560, vocab_size=49152, seq_len=2048,
                mor=MorConfig(scale=0.1, output="released"),
            ),
            train=TrainConfig(
                steps=10_000, batch_size=512, micro_batch=8, lr=1e-3, warmup=0.05, decay=0.2,
                recompute="loop", eval_every=1000, save_every=1000,
            ),
        ),
    ]  # fmt: skip
