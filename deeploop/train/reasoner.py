"""Train a reasoner (`deeploop.model.reasoner`) on puzzles, with deep supervision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deeploop.data.puzzles.puzzle_set import Examples
from deeploop.data.puzzles.source import PuzzleSource
from deeploop.eval.boards import by_segment
from deeploop.model.looplm import count_parameters
from deeploop.model.reasoner import Carry, Reasoner
from deeploop.train.describe import without_effect
from deeploop.train.halting import least_segments
from deeploop.train.optim import clip_gradients, learning_rate, make_optimizer, step_if_finite
from deeploop.train.supervision import (
    Rows,
    SegmentResult,
    first_rows,
    refill,
    run_segment,
)
from deeploop.train.trainer import Trainer
from deeploop.utils.device import device_name
from deeploop.utils.distributed import Ranks
from deeploop.utils.spans import span


class SegmentMetrics:
    """Figures of a step, summed over the rows of the whole batch; on the device until read."""

    def __init__(self, batch_size: int, device: torch.device):
        self.batch_size = batch_size
        self.sums: dict[str, Tensor] = {}
        self.grad_norm = torch.zeros((), device=device)
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=device)

    def add(self, result: SegmentResult) -> None:
        """Add the rows of one micro-batch."""
        for name, value in result.sums.items():
            self.sums[name] = self.sums.get(name, 0) + value

    def gather(self, ranks: Ranks) -> None:
        """Sum over the ranks, and note whether a loss or the gradient is not finite."""
        ranks.all_reduce_(self.sums.values())
        self.nonfinite |= ~torch.stack([self.grad_norm, *self.sums.values()]).isfinite().all()

    def figures(self) -> dict[str, Any]:
        """Return means over rows; those of halted rows are absent where none halted."""
        sums = {name: value.item() for name, value in self.sums.items()}
        halted, n = sums.pop("halted"), self.batch_size
        of_halted = {name: sums.pop(name) for name in ("halted_exact", "halted_steps")}
        figures = {"loss": sums.pop("answers") / n, "grad_norm": self.grad_norm.item()}
        figures |= {"accuracy": sums.pop("exact") / n, "token_accuracy": sums.pop("token") / n}
        figures |= {f"{name}_loss": value / n for name, value in sums.items()}
        figures["halted"] = halted / n
        if halted:
            figures["halted_accuracy"] = of_halted["halted_exact"] / halted
            figures["halted_segments"] = of_halted["halted_steps"] / halted
        return figures


class ReasonerTrainer(Trainer):
    """A run of a Reasoner; its rows carry their states from step to step."""

    stream = "a state of the batch"
    model: Reasoner
    corpus: PuzzleSource

    def make(self) -> None:
        self.model = Reasoner(self.config.model).to(self.device)
        self.optimizer = make_optimizer(self.model, self.config.train)
        self.rows = first_rows(self.model, self.examples())
        if self.config.train.compile:
            for sublayer in self.model.all_sublayers():
                sublayer.branch.compile()

    def examples(self) -> Examples:
        """Return this rank's rows of the next batch, on the device."""
        t = self.config.train
        examples = self.corpus.examples(
            seed=t.seed, step=self.done, global_batch=t.batch_size, rows=self.sequences
        )
        return Examples(*map(self.send, examples))

    def take_step(self, observe: bool = False) -> SegmentMetrics:
        t, r = self.config.train, self.config.model.reasoner
        with span("data"):
            new = self.examples()
            mine = self.sequences
            numbers = torch.arange(mine.start, mine.stop) + self.done * t.batch_size
            least = self.send(least_segments(t.seed, numbers, r))
        rows = refill(self.model, self.rows, new, least)
        self.inputs = rows.examples.inputs
        metrics, after = SegmentMetrics(t.batch_size, self.device), []
        for first in range(0, len(mine), self.micro):
            some = slice(first, first + self.micro)
            result = run_segment(self.model, self.config, rows_of(rows, some))
            metrics.add(result)
            after.append(result.rows)
        self.rows = after[0] if len(after) == 1 else join(after)
        self.ranks.all_reduce_(p.grad for p in self.model.parameters() if p.grad is not None)
        with span("optimizer"):
            metrics.grad_norm = clip_gradients(self.model, t.clip)
            rate = learning_rate(self.done, t)
            step_if_finite(self.optimizer, metrics.grad_norm, rate)
            if self.model.puzzles is not None:
                skip = ~metrics.grad_norm.isfinite()
                puzzle_rate = t.puzzle_lr * rate / t.lr
                self.model.puzzles.step(puzzle_rate, t.puzzle_decay, self.ranks, skip)
            self.optimizer.zero_grad(set_to_none=True)
        metrics.gather(self.ranks)
        return metrics

    # Carried from step to step

    def carried(self) -> Mapping[str, Tensor]:
        rows = self.rows
        mine = {
            "high": rows.carry.high, "low": rows.carry.low, "steps": rows.steps,
            "least": rows.least, "halted": rows.halted.to(torch.uint8), **rows.examples._asdict(),
        }  # fmt: skip
        every = {f"rows.{name}": self.ranks.all_gather(tensor) for name, tensor in mine.items()}
        return {**super().carried(), **every}

    def load_carried(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_carried(tensors)
        mine = slice(self.sequences.start, self.sequences.stop)

        def rows(name: str) -> Tensor:
            return tensors[f"rows.{name}"][mine].to(self.device)

        self.rows = Rows(
            Carry(rows("high"), rows("low")), Examples(*map(rows, Examples._fields)),
            rows("steps"), rows("least"), rows("halted").bool(),
        )  # fmt: skip

    # Validation and checks

    def held_out_figures(self) -> dict[str, Any] | None:
        measured = by_segment(
            self.model, self.corpus, self.config, self.micro, self.ranks, self.stop_validation
        )
        if measured is None:
            return None
        return {
            "val_loss": measured.loss[-1],
            "val_bits_per_byte": None,
            "val_accuracy": measured.exact[-1],
            "val_token_accuracy": measured.token[-1],
            "val_segment_accuracies": measured.exact,
            "val_segments": measured.mean_segments,
        }

    def in_words(self, figures: dict[str, Any]) -> str:
        by = figures["val_segment_accuracies"]
        shown = sorted({1, 2, 4, 8, len(by)} & set(range(1, len(by) + 1)))
        return (
            f"held-out loss {figures['val_loss']:.4f}, accuracy {figures['val_accuracy']:.3f} "
            f"({figures['val_token_accuracy']:.3f} of cells); after segments "
            + ", ".join(f"{n}: {by[n - 1]:.3f}" for n in shown)
            + f"; would halt after {figures['val_segments']:.1f}"
        )

    def step_in_words(self, figures: dict[str, Any]) -> list[str]:
        return [f"loss {figures['loss']:.4f}", f"accuracy {figures['accuracy']:.3f}"]

    def forward_is_finite(self) -> Tensor:
        carry = self.rows.carry
        return torch.stack([carry.high.isfinite().all(), carry.low.isfinite().all()]).all()

    def worst(self) -> str:
        sizes = {name: x.abs().amax().item() for name, x in self.rows.carry._asdict().items()}
        name = max(sizes, key=lambda k: sizes[k] if sizes[k] == sizes[k] else float("inf"))
        return f"z_{name}, {sizes[name]:.3g}"

    def describe(self) -> list[str]:
        c, r, t = self.config, self.config.model.reasoner, self.config.train
        kernels = "Triton kernels" if self.device.type == "cuda" else "closed forms in PyTorch"
        return [
            f"model    {c.preset}: {self.model.describe()}, width {c.model.d_model}, "
            f"{count_parameters(self.model):,} parameters",
            f"data     {self.corpus.describe()}",
            f"paths    {device_name(self.device)}, {t.precision}; updates: {kernels}",
            f"backprop {r.gradient}, at most {r.segments} segments of {r.cycles_high} x "
            f"({r.cycles_low} low + 1 high) passes; {t.optimizer}",
            *(f"unused   {name}" for name in without_effect(c)),
            f"run      {self.folder}",
        ]


def rows_of(rows: Rows, some: slice) -> Rows:
    """Return some of the rows."""
    carry, examples, *others = rows
    return Rows(
        Carry(*(x[some] for x in carry)), Examples(*(x[some] for x in examples)),
        *(x[some] for x in others),
    )  # fmt: skip


def join(pieces: list[Rows]) -> Rows:
    """Return the rows of several micro-batches, in order."""

    def cat(*tensors: Tensor) -> Tensor:
        return torch.cat(tensors)

    carries, examples, *others = zip(*pieces, strict=True)
    return Rows(
        Carry(*map(cat, *carries)), Examples(*map(cat, *examples)),
        *(torch.cat(tensors) for tensors in others),
    )  # fmt: skip
