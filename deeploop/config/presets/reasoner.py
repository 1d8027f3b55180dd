"""HRM (arXiv 2506.21734), TRM (arXiv 2510.04871), and HRM with DeepLoop's scales (2607.13491)."""

import dataclasses
from typing import Any

from deeploop.config import Config, DataConfig, ModelConfig, ReasonerConfig, TrainConfig

CELLS = {"sudoku": (81, 11), "maze": (900, 6), "arc": (900, 12)}  # of a puzzle, and ids


def reasoner_presets() -> list[Config]:
    """List reasoners of sizes for a CPU, which are ours, and those of the papers' code.

    Of the papers and their code: widths, blocks, cycles, which calls have gradients, halting, the
    puzzles' positions, AdamATan2 with its learning rate, decay, betas, batch and warm-up, the
    constant schedule, the average of TRM's weights. The steps are epochs x examples / batch, those
    of ARC a guess. Their data are built by `deeploop data`, or downloaded: give the folder as
    --data.puzzles. Of the tiny models only the rules are the papers'.
    """
    return [*tiny_presets(), *hrm_presets(), *trm_presets()]


def tiny_presets() -> list[Config]:
    """List the presets that a CPU trains in minutes."""
    hrm = ReasonerConfig(cycles_high=2, segments=8)
    trm = ReasonerConfig(
        cycles_high=3, cycles_low=6, shared=True, gradient="last_cycle", mixer="mlp",
        positions=False, halting="halt", segments=8,
    )  # fmt: skip
    attention = dataclasses.replace(trm, mixer="attention", positions=True, cycles_low=4)
    return [
        tiny("hrm-sudoku-tiny", "sudoku-4x4", 16, 6, hrm, 4e-3, 2000),
        tiny("trm-sudoku-tiny", "sudoku-4x4", 16, 6, trm, 2e-3, 700),
        tiny("trm-maze-tiny", "maze-9x9", 81, 6, attention, 1e-3, 700),
    ]


def tiny(
    name: str, data: str, cells: int, vocab: int, r: ReasonerConfig, lr: float, steps: int
) -> Config:
    """Make a preset of two blocks a module on generated puzzles."""
    return Config(
        preset=name,
        model=model(
            r, d_model=64, n_heads=2, d_ff=256, vocab_size=vocab, seq_len=cells
        ),
        data=DataConfig(puzzles=data),
        train=TrainConfig(
            steps=steps, batch_size=64, lr=lr, optimizer="adam_atan2", schedule="constant",
            warmup=0.05, weight_decay=0.1, decay_gains=True, clip=0.0, ema=0.99, precision="fp32",
            eval_every=200, save_every=200, eval_tokens=500 * cells,
        ),
    )  # fmt: skip


def model(r: ReasonerConfig, **fields: Any) -> ModelConfig:
    """Make the fields of a reasoner's model."""
    return ModelConfig(residual="plain_post_norm", norm_eps=1e-5, reasoner=r, **fields)


def large(name: str, r: ReasonerConfig, steps: int, ema: float = 0.0) -> Config:
    """Make a preset of the papers' width on a folder of data called by the puzzle's name."""
    kind = name.split("-")[1]
    (cells, vocab), arc = CELLS[kind], kind == "arc"
    return Config(
        preset=name,
        model=model(
            r, d_model=512, n_heads=8, d_ff=1536, vocab_size=vocab, seq_len=cells
        ),
        data=DataConfig(puzzles=f"{kind}/"),
        train=TrainConfig(
            steps=steps, batch_size=768, lr=1e-4, optimizer="adam_atan2", ema=ema,
            weight_decay=0.1 if arc else 1.0, puzzle_lr=1e-2 if arc else 1e-4,
            puzzle_decay=0.1 if arc else 1.0, warmup=2000 / steps, schedule="constant", clip=0.0,
            decay_gains=True, eval_every=1000, save_every=1000,
        ),
    )  # fmt: skip


def hrm_presets() -> list[Config]:
    """List HRM's own runs, and that on ARC with DeepLoop's alpha and beta.

    `-deeploop` counts M_g = 24 sublayer visits, as the paper states, `-deeploop-counted` the 16
    that have gradient in HRM's released code, and here.
    """
    r = ReasonerConfig(cycles_high=2, layers_high=4, layers_low=4, puzzle_tokens=1)
    return [
        large("hrm-sudoku", r, 26_041),
        large("hrm-maze", r, 26_041),
        large("hrm-arc", r, 518_000),
        large("hrm-arc-deeploop", dataclasses.replace(r, visits="paper"), 518_000),
        large("hrm-arc-deeploop-counted", dataclasses.replace(r, visits="counted"), 518_000),
    ]


def trm_presets() -> list[Config]:
    """List TRM's runs: Sudoku with the SwiGLU across positions, mazes and ARC with attention."""
    r = ReasonerConfig(
        cycles_high=3, cycles_low=4, shared=True, gradient="last_cycle", puzzle_tokens=16,
        halting="halt",
    )  # fmt: skip
    sudoku = dataclasses.replace(r, cycles_low=6, mixer="mlp", mixer_width=512, positions=False)
    return [
        large("trm-sudoku", sudoku, 65_104, 0.999),
        large("trm-maze", r, 65_104, 0.999),
        large("trm-arc", r, 518_000, 0.999),
    ]
