"""Train a run: step, log, validate, save, and end whole on a signal.

One process, or one of several that share each batch (see `deeploop.utils.distributed`).
"""

import contextlib
import math
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from deeploop.config import Config
from deeploop.config.loop_count import loops_of_sequences
from deeploop.data.source import Source
from deeploop.eval.generate import sample
from deeploop.eval.validate import held_out_targets
from deeploop.model.looplm import LoopLM, count_parameters
from deeploop.model.noise import sequence_keys
from deeploop.model.state import Draws
from deeploop.runs import checkpoint
from deeploop.runs.metrics_file import MetricsFile
from deeploop.train.backprop import MicroBatch
from deeploop.train.finite import first_nonfinite, state_is_finite, stream_is_finite
from deeploop.train.held_out import held_out_figures, in_words
from deeploop.train.losses import loss_rule
from deeploop.train.metrics import StepMetrics, largest_rms
from deeploop.train.optim import learning_rate, make_optimizer
from deeploop.train.parents import Parents, load_teacher, start_from
from deeploop.train.progress import ProgressBar
from deeploop.train.step import train_step
from deeploop.train.stop import stop_signals
from deeploop.train.throughput import Throughput
from deeploop.utils.console import open_console
from deeploop.utils.device import autocast, device_name, peak_memory
from deeploop.utils.disk import write_json
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import Diverged, InputError
from deeploop.utils.spans import span

SAMPLE_PROMPT, SAMPLE_TOKENS = 32, 200


class Trainer:
    """One run: its model, optimizer, corpus and folder, and the number of steps done."""

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
        self.model = LoopLM(config.model).to(self.device)
        loss_rule(config.train).freeze_others(self.model)
        self.teacher: LoopLM | None = None
        self.optimizer = make_optimizer(self.model, config.train)
        if config.train.compile:
            # Branches only: updates are single kernels already, and no graph
            # then depends on the number of loops.
            for sublayer in self.model.all_sublayers():
                sublayer.branch.compile()
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
        self.done = ckpt.step

    def learn_from(self, parents: Parents) -> None:
        """Load the weights to start from and the teacher; raises InputError on a misfit."""
        if parents.init is not None:
            start_from(self.config, parents.init, self.model)
        if parents.teacher is not None:
            self.teacher = load_teacher(self.config, parents.teacher, self.device)

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

    def step(self, observe: bool = False) -> StepMetrics:
        """Take the next step of the run (`deeploop.train.step`)."""
        with span("data"):
            micro_batches = self.micro_batches()
        lr = learning_rate(self.done, self.config.train)
        metrics = train_step(
            self.model, self.optimizer, self.config, micro_batches, lr,
            step=self.done, ranks=self.ranks, observe=observe, teacher=self.teacher,
        )  # fmt: skip
        self.nonfinite |= metrics.nonfinite
        self.done += 1
        return metrics

    def micro_batches(self) -> list[MicroBatch]:
        """Return this rank's sequences of the next batch, and what is drawn for each, in pieces."""
        t, rows = self.config.train, self.sequences
        self.inputs, targets = self.batch()
        count = self.corpus.batch_targets(**self.next_batch())
        keys = first_loops = None
        if self.config.model.start == "noise":
            keys = sequence_keys(t.seed, self.done, rows)
        if t.loop_count_per == "sequence":
            drawn = torch.tensor(loops_of_sequences(t, self.config.model.loops, self.done))
            first_loops = (drawn.max() - drawn)[rows.start : rows.stop]

        def piece(x: Tensor | None, first: int) -> Tensor | None:
            return None if x is None else self.send(x[first : first + self.micro])

        return [
            MicroBatch(
                self.send(self.inputs[i : i + self.micro]),
                self.send(targets[i : i + self.micro]),
                Draws(piece(keys, i), piece(first_loops, i)),
                count,
            )
            for i in range(0, len(rows), self.micro)
        ]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return this rank's sequences of the next batch: tokens and targets, int64 [B, T]."""
        return self.corpus.batch(**self.next_batch(), rows=self.sequences)

    def next_batch(self) -> dict[str, int]:
        """Return the arguments that name the next batch to the corpus."""
        t, seq_len = self.config.train, self.config.model.seq_len
        return dict(seed=t.seed, step=self.done, global_batch=t.batch_size, seq_len=seq_len)

    def last_inputs(self) -> Tensor:
        """Return the first micro-batch of the last step, of the next before any, on the device."""
        inputs = self.batch()[0] if self.inputs is None else self.inputs
        return inputs[: self.micro].to(self.device)

    def send(self, x: Tensor) -> Tensor:
        """Copy a tensor to the run's device, without waiting on CUDA."""
        if self.device.type == "cuda":
            x = x.pin_memory()
        return x.to(self.device, non_blocking=True)

    def log(self, metrics: StepMetrics) -> None:
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
                f"loss {figures['loss']:.4f}",
                f"rms {figures['residual_rms'][-1]:.2f}",
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
        with self.speed.paused():
            figures = held_out_figures(
                self.model, self.corpus, self.config, self.micro, self.ranks, self.stop_validation
            )
        if figures is None:
            return
        loss = figures["val_loss"]
        self.metrics.write(step=self.done, **figures)
        if not math.isfinite(loss):
            raise self.diverged("held-out loss is not finite at step")
        self.live.say(f"step {self.done:>6}  {in_words(figures)}")
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
            if not self.ranks.is_main:
                return
            checkpoint.save(self.folder, self.done, self.config, self.model, self.optimizer)
            for sentence in checkpoint.prune(self.folder, self.config.train.keep):
                self.live.say(sentence)

    def check_state(self) -> None:
        """Raise Diverged if a weight, a moment or the stream is not finite on any rank."""
        tokens = self.last_inputs()
        with autocast(self.device, self.config.train.precision):
            finite = stream_is_finite(self.model, tokens)
        finite &= state_is_finite(self.model, self.optimizer)
        if self.ranks.any_rank(not finite):
            name = first_nonfinite(self.model, self.optimizer) or "the residual stream"
            raise self.diverged(f"{name} is not finite at step")

    def check_finite(self) -> None:
        """Raise Diverged once a loss or gradient was not finite, naming the worst visit."""
        if self.nonfinite:
            raise self.diverged("loss or gradient is not finite by step")

    def diverged(self, reason: str) -> Diverged:
        """Return the error that ends the run: the reason, the worst visit and a remedy."""
        worst = largest_rms(self.model, self.last_inputs())
        kept = checkpoint.steps(self.folder)
        scale = "" if self.config.model.exponent is None else " or a larger model.p"
        return Diverged(
            f"{reason} {self.done}, largest residual at {worst}; "
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
            values["sample"] = self.sample()
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

    def sample(self) -> str | None:
        """Continue held-out text with the model; None without a tokenizer."""
        tokenizer = self.corpus.tokenizer
        if tokenizer is None:
            return None
        length = min(SAMPLE_PROMPT, self.corpus.held_out_targets, self.config.model.seq_len)
        prompt, _ = next(self.corpus.held_out(1, length, length))
        self.model.eval()
        with autocast(self.device, self.config.train.precision):
            tokens = sample(self.model, prompt.to(self.device), SAMPLE_TOKENS, temperature=0.8)
        self.model.train()
        return tokenizer.decode(tokens[0].tolist())


def due(step: int, every: int, last: int) -> bool:
    """Return whether `step` ends a period of `every` steps; the last step always does."""
    return step == last or (every > 0 and step % every == 0)
