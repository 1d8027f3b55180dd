"""The Universal Transformer (arXiv 1807.03819) with adaptive computation time."""

from deeploop.config import Config, ModelConfig, TrainConfig


def universal_presets() -> list[Config]:
    """List a Universal Transformer that trains on two CPU cores in two minutes.

    Of the paper: post-norm, one block, the sinusoid of the loop's number, ACT with its bias,
    threshold and weight. Different here: a causal language model in the place of encoder and
    decoder, RMSNorm, SwiGLU, RoPE in the place of the sinusoid of positions. Sizes and learning
    rate are ours.
    """
    return [
        Config(
            preset="ut-tiny",
            model=ModelConfig(
                residual="post_norm", loop_signal="add", depth="act", d_model=192, n_layers=1,
                loops=6, n_heads=3,
            ),
            train=TrainConfig(steps=200, lr=2e-3),
        )
    ]  # fmt: skip
