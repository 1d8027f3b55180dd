"""The models of DeepLoop (arXiv 2607.13491)."""

from deeploop.config import Config, DataConfig, ModelConfig, TrainConfig

NAMES = {"pre_norm": "baseline", "deeploop": "deeploop"}  # as the paper calls the rules


def gpt2(size: str, loops: int, residual: str) -> Config:
    """Return a model of DeepLoop (arXiv 2607.13491): 100,000 steps of 480 x 1024 tokens, 49.15 B.

    The paper leaves the learning rate, its schedule, heads and QK norm unstated; they are those of
    its sister paper (arXiv 2601.00417), without that paper's muP scaling. The SwiGLU of
    medium is 2752 wide, 8/3 of 1024 up to a multiple of 64: 355.1 M parameters for the
    paper's 353 M.
    """
    d_model, n_layers, n_heads = {"small": (768, 12, 6), "medium": (1024, 24, 8)}[size]
    return Config(
        preset=f"gpt2-{size}-r{loops}-{NAMES[residual]}",
        model=ModelConfig(
            residual=residual,
            d_model=d_model,
            n_layers=n_layers,
            loops=loops,
            n_heads=n_heads,
            vocab_size=50304,
            seq_len=1024,
            qk_norm=True,
        ),
        data=DataConfig(tokenizer="gpt2"),
        train=TrainConfig(
            steps=100_000,
            batch_size=480,
            micro_batch=12 if (size, loops) == ("medium", 7) else 16,  # 16 is over 141 GB
            lr=1e-3,
            schedule="cosine",
            warmup=0.02,
            decay=0.0,
            eval_every=1000,
            eval_tokens=2**20,
            save_every=1000,
        ),
    )


def gpt2_presets() -> list[Config]:
    """List the paper's 16 runs: two sizes, R of 1, 3, 5 and 7, two residual rules."""
    return [
        gpt2(size, loops, residual)
        for size in ("small", "medium")
        for loops in (1, 3, 5, 7)
        for residual in NAMES
    ]
