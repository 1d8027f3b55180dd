"""A reasoner that trains in a second, and its boards."""

from deeploop.config import Config, DataConfig, ModelConfig, ReasonerConfig, TrainConfig
from deeploop.data.puzzles.sudoku_set import build_sudoku

KINDS = {
    "hrm": ReasonerConfig(cycles_high=2, layers_low=1, layers_high=1, segments=3, puzzle_tokens=1),
    "trm": ReasonerConfig(
        cycles_high=2, layers_low=1, shared=True, gradient="last_cycle", mixer="mlp",
        positions=False, halting="halt", segments=3,
    ),
}  # fmt: skip


def write_boards(folder, seed=0):
    """Write a data set of 4x4 Sudoku, small enough that an epoch has few batches."""
    build_sudoku(
        str(folder / "boards"), size=4, puzzles=40, test=12, givens="8-9", augment=1, seed=seed
    )
    return str(folder / "boards")


def small_reasoner(boards, out, kind="hrm", **train):
    """Return a run of six steps into `out`."""
    fields = {"steps": 6, "batch_size": 6, "ema": 0.9} | train
    return Config(
        preset="test",
        model=ModelConfig(
            residual="plain_post_norm", d_model=16, n_heads=2, seq_len=16, reasoner=KINDS[kind]
        ),
        data=DataConfig(puzzles=boards),
        train=TrainConfig(
            precision="fp32", device="cpu", optimizer="adam_atan2", lr=1e-2, log_every=1,
            eval_every=3, eval_tokens=160, save_every=2, keep=0, clip=0.0, out=str(out), **fields,
        ),
    )  # fmt: skip
