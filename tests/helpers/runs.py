"""A run that takes a second, and its text."""

from pathlib import Path

from deeploop.config import Config, DataConfig, ModelConfig, TrainConfig


def write_corpus(folder: Path) -> Path:
    """Write a small text with structure enough to learn from; returns its file."""
    path = folder / "corpus.txt"
    path.write_text("".join(f"line {i % 7}: the quick brown fox\n" for i in range(400)))
    return path


def small_run(corpus: Path) -> Config:
    """Return a run of 20 steps of one block and two loops into the folder `run` beside its text."""
    return Config(
        preset="test",
        model=ModelConfig(d_model=16, n_layers=1, loops=2, n_heads=2, seq_len=16),
        data=DataConfig(path=str(corpus)),
        train=TrainConfig(
            steps=20,
            batch_size=4,
            precision="fp32",
            device="cpu",
            log_every=5,
            eval_every=10,
            eval_tokens=256,
            save_every=10,
            out=str(corpus.parent / "run"),
        ),
    )
