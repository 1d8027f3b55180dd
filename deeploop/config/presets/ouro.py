"""The looped language model Ouro (arXiv 2510.25741)."""

from deeploop.config import Config, ModelConfig, TrainConfig


def ouro_presets() -> list[Config]:
    """List the 1.4B model in stage I, and one that trains on two CPU cores in two minutes.

    Of the paper: 24 blocks x 4 loops, norms on both sides of each branch, the normed state as the
    next loop's input and the head's, exit gates, the expected loss with an entropy of weight .05,
    learning rate, decay and batch (4 M tokens for 3 T, its stage 1b). A fit: the SwiGLU's width of
    5632, to the parameter count; different here: head and embedding share a matrix, and RMSNorm
    follows the embedding. Stage II, the gate alone, is `--train.init RUN --loss gate`. Of the tiny
    model only the rules are Ouro's.
    """
    return [
        Config(
            preset="ouro-tiny",
            model=ModelConfig(
                residual="peri_norm", loop_norm="each", depth="gate", d_model=128, n_layers=2,
                loops=4, n_heads=4,
            ),
            train=TrainConfig(steps=200, loss="expected", lr=2e-3),
        ),
        Config(
            preset="ouro-1.4b",
            model=ModelConfig(
                residual="peri_norm", loop_norm="each", depth="gate", d_model=2048, n_layers=24,
                loops=4, n_heads=16, d_ff=5632, vocab_size=49152, seq_len=4096,
            ),
            train=TrainConfig(
                steps=715_000, batch_size=1024, micro_batch=1, loss="expected", lr=3e-4,
                warmup=2000 / 715_000, decay=0.0, recompute="loop", eval_every=1000,
                save_every=1000,
            ),
        ),
    ]  # fmt: skip
