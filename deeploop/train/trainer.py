"""Train a run: step, log, validate, save, and end whole on a signal.

One process, or one of several that share each batch (see `deeploop.utils.distributed`). A subclass
says how a kind of model is made, takes a step, is validated and checked:
`deeploop.train.language` those of a language model.
"""

import contextlib
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor, nn

from deeploop.config import Config
from deeploop.data.source import Source
from deeploop.eval.validate import held_out_targets
from deeploop.model.looplm import count_parameters
from deeploop.runs import checkpoint
from deeploop.runs.metrics_file import MetricsFile
from deeploop.train.finite import first_nonfinite, state_is_finite
from deeploop.train.optim import learning_rate
from deeploop.train.parents import Parents
from deeploop.train.progress import ProgressBar
from deeploop.train.stop import stop_signals
from deeploop.train.throughput import Throughput
from deeploop.train.weight_average import WeightAverage
from deeploop.utils.console import open_console
from deeploop.utils.device import autocast, device_name, peak_memory
from deeploop.utils.disk import write_json
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import Diverged, InputError

AVERAGE = "average."  # before the name of an averaged weight among the carried tensors


class Measured(Protocol):
    """The figures of a step; those of `deeploop.train.metrics.StepMetrics`, or like them."""

    nonfinite: Tensor  # bool scalar on the device

    def figures(self) -> dict[str, Any]:
        """Return the figures that metrics.jsonl has; waits for the device."""


class Trainer(ABC):
    """One run: its model, optimizer, corpus and folder, and the number of steps done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream = "the residual stream"  # whose values `forward_is_finite` checks

    def __init__(
        self,
        config: Config,
        corpus: Source,
        floors: dict[str, float],
        folder: Path,
        console: Console,
        ranks: Ranks = Ranks(),  # noqa: B008
    ):
        torch.manual_seed(config.train.seed)
        self.config, self.corpus, self.floors = config, corpus, floors
        self.folder, self.console, self.ranks = folder, console, ranks
        self.device = torch.device(config.train.device)
        self.sequences = ranks.local_rows(config.train.batch_size)
        self.micro = config.train.micro_batch or len(self.sequences)
        self.lock = contextlib.ExitStack()  # holds the lock on the run folder until fit ends
        self.done = 0
        self.stopped: list[int] = []  # signals that ask the run to stop, received so far
        self.inputs: Tensor | None = None  # this rank's sequences of the last step, int64 [B, T]
        # At which step, to how many nats per target, and all figures of that validation.
        self.validated: tuple[int, float, dict[str, Any]] = -1, math.nan, {}
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=self.device)
        self.speed = Throughput(config.train.batch_size * config.model.seq_len)
        self.make()
        decay = config.train.ema
        self.average = WeightAverage(self.model, decay) if decay else None

    # Of a kind of model

    @abstractmethod
    def make(self) -> None:
        """Make the model and the optimizer."""

    @abstractmethod
    def describe(self) -> list[str]:
        """Return the log's first lines: the model, the data and the implementations that run."""

    @abstractmethod
    def take_step(self, observe: bool) -> Measured:
        """Train on the batch of step `done`; sets `inputs`. `observe`: for a line of the log."""

    @abstractmethod
    def held_out_figures(self) -> dict[str, Any] | None:
        """Validate; returns the figures for metrics.jsonl, None where a signal ended it."""

    @abstractmethod
    def in_words(self, figures: dict[str, Any]) -> str:
        """Return figures of `held_out_figures` as a line of the log has them."""

    @abstractmethod
    def step_in_words(self, figures: dict[str, Any]) -> list[str]:
        """Return figures of a step as the progress line has them, the first with the loss."""

    @abstractmethod
    def forward_is_finite(self) -> Tensor:
        """Return whether the model's values on the last batch are finite: bool scalar."""

    @abstractmethod
    def worst(self) -> str:
        """Name where in the model the values on the last batch are largest."""

    def learn_from(self, parents: Parents) -> None:
        """Load the weights to start from and the teacher; raises InputError on a misfit."""
        if parents.init is not None or parents.teacher is not None:
            raise InputError("train.init and train.teacher: are read by language models alone")

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the average of its weights, if there is one."""
        return contextlib.nullcontext() if self.average is None else self.average.used()

    def carried(self) -> Mapping[str, Tensor]:
        """Return the tensors, beside weights and moments, that the next step reads, of all ranks.

        Called on every rank. Those of the main rank are saved.
        """
        if self.average is None:
            return {}
        return {AVERAGE + name: x for name, x in self.average.state_dict().items()}

    def load_carried(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `carried` returned, of the same names, shapes and dtypes."""
        if self.average is not None:
            self.average.load_state_dict(
                {n.removeprefix(AVERAGE): x for n, x in tensors.items() if n.startswith(AVERAGE)}
            )

    def samples(self) -> dict[str, Any]:
        """Return examples of the model's output for the summary."""
        return {}

    # Of every run

    @classmethod
    def open(cls, config: Config, resume: str | None = None) -> "Trainer":
        """Load the corpus, build or restore the model and make the run's folder.

        Args:
            config: of the run; `config.train.out` is its folder.
            resume: a run's folder or a checkpoint to go on from.

        Raises:
            InputError: what `deeploop train` refuses.
        """
        from deeploop.train.setup import open_run  # which imports this module

        ckpt = None if resume is None else checkpoint.find(resume, begin=True)
        return open_run(config, open_console(), ckpt)

    def restore(self, ckpt: checkpoint.Checkpoint) -> None:
        """Load weights, optimizer state and step of a checkpoint; raises InputError on a misfit."""
        checkpoint.load_weights(ckpt, self.model)
        checkpoint.load_optimizer(ckpt, self.optimizer, self.model)
        self.load_carried(checkpoint.load_carried(ckpt, self.carried()))
        self.done = ckpt.step

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or to the signal that stops it; returns the summary."""
        with self.lock:
            stopped_by = self.run_steps()
            with stop_signals("the summary", self.ranks.is_main):
                return self.summary(stopped_by)

    def run_steps(self) -> int | None:
        """Take the steps that are left; on bad input, such as a corpus that changed, save first."""
        try:
            return self.take_steps()
        except InputError:
            # Saving takes all ranks, and only this one may have the error.
            if self.ranks.world == 1 and self.inputs is not None:
                with contextlib.suppress(InputError, Diverged):  # the first error says more
                    self.save()
            raise

    def take_steps(self) -> int | None:
        """Take the steps that are left, and validate the last one.

        Returns:
            The signal that ended the run before that, or None.
        """
        t = self.config.train
        self.metrics = MetricsFile(self.folder, self.done, write=self.ranks.is_main)
        with (
            stop_signals("this step", self.ranks.is_main) as self.stopped,
            ProgressBar(self.console, t.steps, self.done) as self.live,
        ):
            if self.metrics.note:
                self.live.say(self.metrics.note)
            self.speed.start()
            ended = self.ranks.any_rank(bool(self.stopped))
            while self.done < t.steps and not ended:
                logging = due(self.done + 1, t.log_every, t.steps)
                metrics = self.step(observe=logging)
                self.live.step(self.done)
                self.speed.count()
                if logging:
                    self.log(metrics)
                # Before a validation, which may take long, so that no stop loses these steps.
                if due(self.done, t.save_every, t.steps):
                    self.save()
                if due(self.done, t.eval_every, t.steps):
                    self.evaluate()
                ended = self.ranks.any_rank(bool(self.stopped))
            if not ended and self.validated[0] != self.done:  # a finished run was resumed
                self.evaluate()
                ended = self.ranks.any_rank(bool(self.stopped))
            self.speed.stop()
            if ended:
                self.save()
        complete = self.validated[0] == t.steps  # a signal came after the last validation
        return (self.stopped or [signal.SIGTERM])[0] if ended and not complete else None

    def step(self, observe: bool = False) -> Measured:
        """Take the next step of the run."""
        metrics = self.take_step(observe)
        if self.average is not None:
            self.average.update()
        self.nonfinite |= metrics.nonfinite
        self.done += 1
        return metrics

    def next_batch(self) -> dict[str, int]:
        """Return the arguments that name the next batch to the corpus."""
        t, seq_len = self.config.train, self.config.model.seq_len
        return dict(seed=t.seed, step=self.done, global_batch=t.batch_size, seq_len=seq_len)

    def send(self, x: Tensor) -> Tensor:
        """Copy a tensor to the run's device, without waiting on CUDA."""
        if self.device.type == "cuda":
            x = x.pin_memory()
        return x.to(self.device, non_blocking=True)

    def log(self, metrics: Measured) -> None:
        """Write a step's figures to metrics.jsonl and the progress line."""
        self.check_finite()
        t = self.config.train
        rate = self.speed.rate()
        lr, memory = learning_rate(self.done - 1, t), peak_memory(self.device)
        figures = metrics.figures()
        self.metrics.write(
            step=self.done, lr=lr, tokens_per_second=rate, memory_gib=memory, **figures
        )
        left = (t.steps - self.done) * self.speed.tokens / rate
        self.live.report(
            self.done,
            [
                *self.step_in_words(figures),
                f"{memory:.1f} GiB",
                f"{rate:,.0f} tokens/s",
                f"ETA {timedelta(seconds=round(left))}",
                f"lr {lr:.1e}",
            ],
        )

    def evaluate(self) -> None:
        """Validate, log the loss and note it in `validated`; a signal ends this with neither.

        Raises Diverged if the loss is not finite.
        """
        self.check_finite()
        with self.speed.paused(), self.averaged():
            figures = self.held_out_figures()
        if figures is None:
            return
        loss = figures["val_loss"]
        self.metrics.write(step=self.done, **figures)
        if not math.isfinite(loss):
            raise self.diverged("held-out loss is not finite at step")
        self.live.say(f"step {self.done:>6}  {self.in_words(figures)}")
        self.validated = self.done, loss, figures

    def stop_validation(self, done: int) -> bool:
        """Show that `done` targets are read; returns whether a signal asks to stop."""
        total = held_out_targets(self.corpus, self.config.train.eval_tokens)
        self.live.validating(done, total)
        return bool(self.stopped)

    def save(self) -> None:
        """Write a checkpoint and delete old ones, if all that it would hold is finite.

        Raises Diverged on every rank otherwise; the checkpoints before stay.
        """
        self.check_finite()
        with self.speed.paused():
            self.check_state()
            carried = self.carried()
            if not self.ranks.is_main:
                return
            checkpoint.save(
                self.folder, self.done, self.config, self.model, self.optimizer, carried
            )
            for sentence in checkpoint.prune(self.folder, self.config.train.keep):
                self.live.say(sentence)

    def check_state(self) -> None:
        """Raise Diverged if a weight, a moment or the stream is not finite on any rank."""
        with autocast(self.device, self.config.train.precision):
            finite = self.forward_is_finite()
        finite &= state_is_finite(self.model, self.optimizer)
        if self.ranks.any_rank(not finite):
            name = first_nonfinite(self.model, self.optimizer) or self.stream
            raise self.diverged(f"{name} is not finite at step")

    def check_finite(self) -> None:
        """Raise Diverged once a loss or gradient was not finite, naming the worst visit."""
        if self.nonfinite:
            raise self.diverged("loss or gradient is not finite by step")

    def diverged(self, reason: str) -> Diverged:
        """Return the error that ends the run: the reason, the worst visit and a remedy."""
        kept = checkpoint.steps(self.folder)
        scale = "" if self.config.model.exponent is None else " or a larger model.p"
        return Diverged(
            f"{reason} {self.done}, largest residual at {self.worst()}; "
            f"the last good checkpoint is {kept[-1] if kept else 'none'}; "
            f"try a lower train.lr{scale}"
        )

    def summary(self, stopped_by: int | None) -> dict[str, Any]:
        """Write summary.json and the plots; returns the summary."""
        values: dict[str, Any] = {"step": self.done, "steps": self.config.train.steps}
        if stopped_by is not None:
            values["stopped_by"] = signal.Signals(stopped_by).name
        else:
            values |= self.validated[2]
            values["val_tokens"] = held_out_targets(self.corpus, self.config.train.eval_tokens)
        if not self.ranks.is_main:
            return values
        if stopped_by is None:
            with self.averaged():
                values |= self.samples()
        values |= {
            "tokens_per_second": self.speed.overall(),
            "parameters": count_parameters(self.model),
            "peak_memory_gib": peak_memory(self.device),
            "device": device_name(self.device),
            "torch": torch.__version__,
        }
        write_json(self.folder / "summary.json", values)
        from deeploop.runs import plots  # matplotlib is slow to import

        lines = self.metrics.read()
        plots.loss(lines, self.floors, self.folder / "loss.png")
        plots.loops(lines, self.folder / "loops.png")
        return values


def due(step: int, every: int, last: int) -> bool:
    """Return whether `step` ends a period of `every` steps; the last step always does."""
    return step == last or (every > 0 and step % every == 0)


def load_average(ckpt: checkpoint.Checkpoint, model: nn.Module) -> None:
    """Give a model the average of its run's weights, where the run has one."""
    if ckpt.config.train.ema:
        checkpoint.load_averages(ckpt, model, AVERAGE)
