"""The trainer, one process: forward, backward, clip, step; log, validate, save, resume."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from deeploop import checkpoint, run
from deeploop.config import Config
from deeploop.data import Corpus
from deeploop.device import device_name, peak_memory
from deeploop.disk import write_json
from deeploop.errors import Diverged
from deeploop.evaluate import autocast, bits_per_byte, validate
from deeploop.generate import sample
from deeploop.lm import LoopLM, count_parameters
from deeploop.loss import IGNORE, linear_cross_entropy
from deeploop.measure import Speed, largest_rms, watch_loops
from deeploop.optim import adamw, clip_gradients, learning_rate, step_if_finite
from deeploop.order import train_batch

SAMPLE_PROMPT, SAMPLE_TOKENS = 32, 200


class Trainer:
    """One run: everything that `fit` needs, and where it stands."""

    def __init__(
        self,
        config: Config,
        corpus: Corpus,
        floors: dict[str, float],
        folder: Path,
        console: Console,
    ):
        torch.manual_seed(config.train.seed)
        self.config, self.corpus, self.floors = config, corpus, floors
        self.folder, self.console = folder, console
        self.device = torch.device(config.train.device)
        self.model = LoopLM(config.model).to(self.device)
        self.optimizer = adamw(self.model, config.train)
        if config.train.compile:
            # Branches only: updates are single kernels already, and no graph
            # then depends on the number of loops.
            for sublayer in self.model.sublayers:
                sublayer.branch.compile()
        self.micro = config.train.micro_batch or config.train.batch_size
        self.lock = contextlib.ExitStack()  # what holds the folder; let go when fit ends
        self.done = 0
        self.bad = torch.zeros((), dtype=torch.bool, device=self.device)
        self.speed = Speed(config.train.batch_size * config.model.seq_len)

    def restore(self, found: checkpoint.Checkpoint) -> None:
        checkpoint.load_model(found, self.model)
        checkpoint.load_optimizer(found, self.optimizer)
        self.done = found.step

    def fit(self) -> dict[str, Any]:
        """Train to the last step, or to the signal that stops it; returns the summary."""
        with self.lock:
            return self.summary(self.run_steps())

    def run_steps(self) -> int | None:
        """The steps that are left; returns the signal that ended them early, if one did."""
        t = self.config.train
        self.metrics = run.Metrics(self.folder, self.done)
        with stop_signals() as stopped, run.Live(self.console, t.steps, self.done) as live:
            self.live = live
            self.speed.start()
            while self.done < t.steps and not stopped:
                logging = due(self.done + 1, t.log_every, t.steps)
                loss, grad_norm, rms = self.step(watch=logging)
                self.done += 1
                live.step(self.done)
                self.speed.count()
                if logging:
                    self.log(loss, grad_norm, rms)
                if due(self.done, t.eval_every, t.steps):
                    self.evaluate()
                if due(self.done, t.save_every, t.steps):
                    self.save()
            self.speed.stop()
            if stopped:
                self.save()
        return stopped[0] if stopped else None

    def step(self, watch: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
        """One optimizer step; returns mean loss [nats], gradient norm and RMS by loop."""
        t = self.config.train
        inputs, targets = self.batch()
        count = int((targets != IGNORE).sum())
        rms: list[Tensor] = []
        seen = watch_loops(rms, self.model) if watch else None
        loss = torch.zeros((), device=self.device)
        for x, y in zip(inputs.split(self.micro), targets.split(self.micro), strict=True):
            with autocast(self.device, t.precision):
                n = self.model(self.send(x), watch=seen)
                part = linear_cross_entropy(n, self.model.embedding.weight, self.send(y)) / count
            part.backward()
            loss += part.detach()
            seen = None
        grad_norm = clip_gradients(self.model, t.clip)
        self.bad |= ~torch.isfinite(grad_norm + loss)
        step_if_finite(self.optimizer, grad_norm, learning_rate(self.done, t))
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm, rms

    def batch(self) -> tuple[Tensor, Tensor]:
        t = self.config.train
        return train_batch(
            self.corpus.train,
            seed=t.seed,
            step=self.done,
            global_batch=t.batch_size,
            seq_len=self.config.model.seq_len,
            rows=range(t.batch_size),
        )

    def send(self, x: Tensor) -> Tensor:
        if self.device.type == "cuda":
            x = x.pin_memory()
        return x.to(self.device, non_blocking=True)

    def log(self, loss: Tensor, grad_norm: Tensor, rms: list[Tensor]) -> None:
        self.check_finite()
        t = self.config.train
        rate = self.speed.rate()
        lr, memory = learning_rate(self.done - 1, t), peak_memory(self.device)
        by_loop = [r.item() for r in rms]
        self.metrics.write(
            step=self.done,
            loss=loss.item(),
            lr=lr,
            grad_norm=grad_norm.item(),
            tokens_per_second=rate,
            residual_rms=by_loop,
            memory_gib=memory,
        )
        left = (t.steps - self.done) * self.speed.tokens / rate
        self.live.report(
            self.done,
            f"loss {loss.item():.4f}  lr {lr:.1e}  {rate:,.0f} tokens/s  "
            f"ETA {timedelta(seconds=round(left))}  rms {by_loop[-1]:.2f}  "
            f"{memory:.1f} GiB",
        )

    def evaluate(self) -> float:
        """Validate and write it down; returns nats per held-out token."""
        t = self.config.train
        with self.speed.paused():
            loss = validate(self.model, self.corpus, self.micro, t.precision, t.eval_tokens)
        bits = bits_per_byte(loss, self.corpus)
        said = "" if bits is None else f" ({bits:.3f} bits/byte)"
        self.metrics.write(step=self.done, val_loss=loss, val_bits_per_byte=bits)
        self.live.say(f"step {self.done:>6}  held-out loss {loss:.4f}{said}")
        return loss

    def save(self) -> None:
        self.check_finite()
        with self.speed.paused():
            checkpoint.save(self.folder, self.done, self.config, self.model, self.optimizer)
            checkpoint.prune(self.folder, self.config.train.keep)

    def check_finite(self) -> None:
        """Raise Diverged once a loss or gradient was not finite, naming the worst visit."""
        if not self.bad:
            return
        worst = largest_rms(self.model, self.batch()[0][: self.micro].to(self.device))
        kept = checkpoint.steps(self.folder)
        raise Diverged(
            f"loss or gradient is not finite by step {self.done}, largest residual at {worst}; "
            f"the last good checkpoint is {kept[-1] if kept else 'none'}; "
            "try a lower train.lr or a larger model.p"
        )

    def summary(self, stopped_by: int | None) -> dict[str, Any]:
        """Finish the run's folder: summary.json and loss.png."""
        values: dict[str, Any] = {"step": self.done, "steps": self.config.train.steps}
        if stopped_by is not None:
            values["stopped_by"] = signal.Signals(stopped_by).name
        else:
            last = [m for m in self.metrics.read() if m["step"] == self.done and "val_loss" in m]
            values["val_loss"] = last[-1]["val_loss"] if last else self.evaluate()
            values["val_bits_per_byte"] = bits_per_byte(values["val_loss"], self.corpus)
            values["sample"] = self.sample()
        values |= {
            "tokens_per_second": self.speed.overall(),
            "parameters": count_parameters(self.model),
            "peak_memory_gib": peak_memory(self.device),
            "device": device_name(self.device),
            "torch": torch.__version__,
        }
        write_json(self.folder / "summary.json", values)
        run.plot_loss(self.metrics.read(), self.floors, self.folder / "loss.png")
        return values

    def sample(self) -> str | None:
        """Held-out text, continued by the model."""
        tokenizer = self.corpus.tokenizer
        if tokenizer is None:
            return None
        length = min(SAMPLE_PROMPT, len(self.corpus.val), self.config.model.seq_len)
        prompt = torch.from_numpy(self.corpus.val.read(0, length)).to(self.device)
        with autocast(self.device, self.config.train.precision):
            tokens = sample(self.model, prompt[None], SAMPLE_TOKENS, temperature=0.8)
        return tokenizer.decode(tokens[0].tolist())


def due(step: int, every: int, last: int) -> bool:
    """Whether `step` ends a period of `every` steps; the last step always does."""
    return step == last or (every > 0 and step % every == 0)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that a step ends whole; a second one interrupts at once."""
    got: list[int] = []

    def note(number: int, frame: object) -> None:
        if got:
            raise KeyboardInterrupt
        got.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield got
        return
    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
