"""Reasoners: HRM (arXiv 2506.21734), TRM (arXiv 2510.04871), DeepLoop on HRM (2607.13491)."""

import dataclasses
from typing import Any

from deeploop.config import Config, ModelConfig, ReasonerConfig, TrainConfig

ARC: dict[str, Any] = {
    "seq_len": 900, "steps": 518_000, "weight_decay": 0.1, "puzzle_lr": 1e-2, "puzzle_decay": 0.1,
}  # fmt: skip
PUZZLE: dict[str, Any] = {"weight_decay": 1.0, "puzzle_lr": 1e-4, "puzzle_decay": 1.0}


def reasoner_presets() -> list[Config]:
    """List the papers' models, and three that train on two CPU cores in minutes.

    Of the papers and their code: widths, blocks, cycles, which calls have gradients, halting, the
    puzzles' positions, AdamATan2 with its learning rate, decay, betas, batch and warm-up, the
    constant schedule, the average of TRM's weights. The steps are epochs x examples / batch, those
    of ARC a guess. DeepLoop's HRM scales by the paper's 24 visits, or by the 16 that the released
    code gives a gradient; all else is HRM's. Of the tiny models only the rules are the papers'.
    """
    return [*_tiny(), *_hrm(), *_trm()]


def _hrm() -> list[Config]:
    reasoner = ReasonerConfig(
        cycles_high=2, cycles_low=2, layers_high=4, layers_low=4, puzzle_tokens=1
    )
    scaled = dataclasses.replace(reasoner, visits="paper")
    counted = dataclasses.replace(reasoner, visits="counted")
    return [
        _paper("hrm-sudoku", reasoner, seq_len=81, steps=26_041, **PUZZLE),
        _paper("hrm-maze", reasoner, seq_len=900, steps=26_041, **PUZZLE),
        _paper("hrm-arc", reasoner, **ARC),
        _paper("hrm-arc-deeploop", scaled, **ARC),
        _paper("hrm-arc-deeploop-counted", counted, **ARC),
    ]


def _trm() -> list[Config]:
    reasoner = ReasonerConfig(
        cycles_high=3, cycles_low=4, layers_low=2, shared=True, gradient="last_cycle",
        puzzle_tokens=16, halting="halt",
    )  # fmt: skip
    mixer = dataclasses.replace(
        reasoner, cycles_low=6, mixer="mlp", mixer_width=512, positions=False
    )
    return [
        _paper("trm-sudoku", mixer, seq_len=81, steps=65_104, ema=0.999, **PUZZLE),
        _paper("trm-arc", reasoner, ema=0.999, **ARC),
    ]


def _paper(preset: str, reasoner: ReasonerConfig, seq_len: int, steps: int, **train: Any) -> Config:
    """Return a model of a paper: width 512, 8 heads, batches of 768, 2,000 steps of warm-up."""
    return Config(
        preset=preset,
        model=ModelConfig(
            residual="plain_post_norm", d_model=512, n_heads=8, d_ff=1536, norm_eps=1e-5,
            seq_len=seq_len, reasoner=reasoner,
        ),
        train=TrainConfig(
            steps=steps, batch_size=768, optimizer="adam_atan2", schedule="constant", lr=1e-4,
            warmup=2000 / steps, clip=0.0, decay_gains=True, eval_every=1000, save_every=1000,
            **train,
        ),
    )  # fmt: skip


def _tiny() -> list[Config]:
    """List first guesses, for sudoku of 4 x 4 cells and mazes of 8 x 8."""
    hrm = ReasonerConfig(cycles_high=2, cycles_low=2, layers_high=1, layers_low=1, segments=8)
    trm = ReasonerConfig(
        cycles_high=3, cycles_low=4, layers_low=2, shared=True, gradient="last_cycle",
        halting="halt", segments=8,
    )  # fmt: skip
    mixer = dataclasses.replace(trm, cycles_low=6, mixer="mlp", positions=False)
    return [
        _small("hrm-sudoku-tiny", hrm, 16),
        _small("trm-sudoku-tiny", mixer, 16, ema=0.99),
        _small("trm-maze-tiny", trm, 64, ema=0.99),
    ]


def _small(preset: str, reasoner: ReasonerConfig, seq_len: int, **train: Any) -> Config:
    return Config(
        preset=preset,
        model=ModelConfig(
            residual="plain_post_norm", d_model=64, n_heads=2, norm_eps=1e-5, seq_len=seq_len,
            reasoner=reasoner,
        ),
        train=TrainConfig(
            steps=1000, batch_size=64, optimizer="adam_atan2", schedule="constant", lr=1e-3,
            clip=0.0, decay_gains=True, **train,
        ),
    )  # fmt: skip
