"""The recurrent-depth model Huginn (arXiv 2502.05171)."""

from typing import Any

from deeploop.config import Config, ModelConfig, TrainConfig

# Huginn's block is RMSNorm(h + f(RMSNorm(h))) with a gain on both norms: deepnorm with alpha 1.
SHAPE: dict[str, Any] = {
    "residual": "deepnorm", "p": 0.0, "start": "noise", "inject": "adapter",
    "adapter_init": "random", "loop_norm": "last",
}  # fmt: skip


def huginn_presets() -> list[Config]:
    """List the 3.5B model, and one that trains on two CPU cores in two minutes.

    Of the released model: sizes, the order of norms (the final norm also before the coda), the
    start from noise, the adapter and its initial weights, the draw of loops around 32 with
    gradients through the last 8, checkpointing of each loop, learning rate, decay and batch.
    Different here: no bias on queries and keys; RMSNorm on the embedding, not a factor sqrt(d);
    Xavier's initial weights, not Takase's; AdamW, not Adam-atan2. The number of steps is a fit to
    800 B tokens. Of the tiny model sizes, loops, learning rate and steps are ours.
    """
    return [
        Config(
            preset="huginn-tiny",
            model=ModelConfig(
                **SHAPE, d_model=128, n_layers=1, loops=4, prelude=1, coda=1, n_heads=4,
            ),
            train=TrainConfig(
                steps=200, loop_count="poisson", backprop="last", backprop_loops=4, lr=2e-3
            ),
        ),
        Config(
            preset="huginn-3.5b",
            model=ModelConfig(
                **SHAPE, d_model=5280, n_layers=4, loops=32, prelude=2, coda=2, n_heads=55,
                d_ff=17920, vocab_size=65536, seq_len=4096, rope_base=50_000.0,
            ),
            train=TrainConfig(
                steps=47_700, batch_size=4096, micro_batch=1, loop_count="poisson",
                backprop="last", backprop_loops=8, recompute="loop", lr=4e-5, warmup=4096 / 47_700,
                decay=0.0, weight_decay=4e-5, eval_every=1000, save_every=1000,
            ),
        ),
    ]  # fmt: skip
