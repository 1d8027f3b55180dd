"""Deep equilibrium models (arXiv 1909.01377), and Parcae's contractive recurrence."""

from typing import Any

from deeploop.config import Config, DataConfig, ModelConfig, SolverConfig, TrainConfig

# The state starts as noise, the loops' input is normed, and the loops end in a linear map.
PARCAE: dict[str, Any] = {
    "residual": "pre_norm", "start": "noise", "inject": "contractive", "input_norm": True,
    "readout_map": True, "qk_norm": True,
}  # fmt: skip


def fixed_point_presets() -> list[Config]:
    """List a deep equilibrium model that trains on two CPU cores in two minutes, and Parcae's."""
    return [_deq_tiny(), *_parcae()]


def _deq_tiny() -> Config:
    """Return a deep equilibrium model: one post-norm block, a state that starts at 0.

    Of the paper: the weight-tied block, z_0 = 0, the input added in every loop, an Anderson solver
    with a relative tolerance (5e-3 for its 1e-3, which is below bfloat16's rounding). Different
    here: RMSNorm, SwiGLU and RoPE, the input added to the state in the place of queries, keys and
    values, solver weights for each token, a phantom gradient (arXiv 2111.05177) of two steps in the
    place of the implicit one. Sizes, damping, loops, learning rate and steps are ours.
    """
    return Config(
        preset="deq-tiny",
        model=ModelConfig(
            residual="post_norm", depth="fixed_point", start="noise", start_std=0.0, inject="add",
            d_model=128, n_layers=1, loops=14, n_heads=4,
            solver=SolverConfig(method="anderson", tolerance=5e-3, damping=0.7),
        ),
        train=TrainConfig(steps=150, backprop="last", backprop_loops=2, lr=2e-3),
    )  # fmt: skip


def _parcae() -> list[Config]:
    """List Parcae's 140M model, and one that trains on two CPU cores in two minutes.

    Of the released code: sizes, the recurrence and its initial values, the norm of the loops'
    input, the linear map after the loops, QK norm, a number of loops drawn for each sequence
    around 8 with gradients through the last 4, batch, clipping, betas, half of the run in decay.
    Different here: AdamW with its own learning rate in the place of Muon, SwiGLU in the place of
    squared ReLU, no value embeddings, head and embedding share a matrix, Xavier's initial weights
    in the place of orthogonal ones; 1 + Poisson(8) loops, 9 in the mean. The head width, the
    vocabulary and the number of steps are guesses. Only the tiny model's rules are Parcae's.
    """
    drawn: dict[str, Any] = {
        "backprop": "last", "loop_count": "poisson", "loop_sigma": 0.0,
        "loop_count_per": "sequence",
    }  # fmt: skip
    return [
        Config(
            preset="parcae-tiny",
            model=ModelConfig(
                **PARCAE, d_model=128, n_layers=1, loops=4, prelude=1, coda=1, n_heads=4,
            ),
            train=TrainConfig(**drawn, steps=150, backprop_loops=2, lr=2e-3),
        ),
        Config(
            preset="parcae-140m",
            model=ModelConfig(
                **PARCAE, d_model=768, n_layers=2, loops=8, prelude=2, coda=2, n_heads=6,
                vocab_size=50257, seq_len=2048,
            ),
            data=DataConfig(tokenizer="gpt2"),
            train=TrainConfig(
                **drawn, steps=10_000, batch_size=256, micro_batch=16, backprop_loops=4, lr=1e-3,
                beta1=0.8, decay=0.5, warmup=0.01, eval_every=1000, save_every=1000,
            ),
        ),
    ]  # fmt: skip
