"""A Relaxed Recursive Transformer (arXiv 2410.20672)."""

from deeploop.config import Config, ModelConfig


def relaxed_presets() -> list[Config]:
    """List a model for a CPU: 2 shared blocks x 3 loops, matrices of rank 8 for each loop.

    The paper starts from trained models (Gemma 2B as 9 x 2, TinyLlama, Pythia) with ranks of 64 to
    512 at widths of about 2048; the rank is as small here as width 192 asks for. Width, loops, rank
    and all training fields are a fit, and so is training from scratch: the paper's own start is
    `deeploop convert` of a trained run without loops.
    """
    model = ModelConfig(residual="pre_norm", n_layers=2, loops=3, lora_rank=8)
    return [Config(preset="rrt-tiny", model=model)]
