"""A run's folder: what is written beside the checkpoints, and the live progress line.

config.json     the resolved configuration
corpus.json     the corpus, its tokenizer and its n-gram floors
metrics.jsonl   a line each log_every steps and each validation
summary.json    the end of the run, or of its newest part
loss.png        training and held-out loss
loops.png       the stream, and the experts' loads, loop by loop
checkpoints/    see deeploop.checkpoint
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from deeploop.config import Config
from deeploop.data import Corpus
from deeploop.disk import disk_errors, exclusive, user_path, write_json, write_text
from deeploop.errors import InputError


def choose(config: Config) -> Path:
    """The folder of a new run, not made yet; raises InputError where it holds something."""
    name = config.train.out or f"runs/{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = user_path(name, "train.out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        onward = f", or go on with --resume {name}" if any(folder.glob("checkpoints/*")) else ""
        raise InputError(f"train.out={name!r}: already exists; choose another folder{onward}")
    return folder


@contextlib.contextmanager
def claimed(folder: Path, new: bool) -> Iterator[None]:
    """Hold a run's folder, made where there is none, alone among processes.

    Raises InputError where it cannot be made, or another run is or has been there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"train.out={str(folder)!r}: cannot be made ({error.strerror})") from error
    with exclusive(folder, wait=False) as held:
        if held is False or (new and any(folder.iterdir())):
            raise InputError(
                f"train.out={str(folder)!r}: another process has begun a run there; "
                "wait for it or choose another folder"
            )
        yield


def read_corpus(folder: Path) -> dict[str, Any]:
    """corpus.json of a run; raises InputError where it is missing or torn."""
    try:
        return dict(json.loads((folder / "corpus.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"run {folder}: corpus.json is not readable ({error})") from error


def identity(corpus: Corpus) -> dict[str, Any]:
    """What tells a corpus from another, or from itself after a change."""
    return {
        "train_tokens": len(corpus.train),
        "val_tokens": len(corpus.val),
        "fingerprint": [corpus.train.fingerprint(), corpus.val.fingerprint()],
    }


def start(folder: Path, config: Config, corpus: Corpus, floors: dict[str, float]) -> None:
    """Write what the run is of: config.json and corpus.json, and the tokenizer's files."""
    with disk_errors(f"run folder {folder}"):
        spec = corpus.tokenizer.save(folder) if corpus.tokenizer else None
        write_text(folder / "config.json", config.to_json())
    write_json(
        folder / "corpus.json",
        {
            "name": corpus.name,
            "tokenizer": spec,
            "vocab_size": corpus.vocab_size,
            **identity(corpus),
            "floors_nats_per_token": floors,
        },
    )


class Metrics:
    """metrics.jsonl: one JSON object a line, flushed as it is written; by one rank alone."""

    def __init__(self, folder: Path, start: int, write: bool = True):
        """Keep the lines up to step `start`; what came later is trained again."""
        self.path, self.on = folder / "metrics.jsonl", write
        if not write:
            return
        kept = [line for line in self.read() if line["step"] <= start]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, **values: Any) -> None:
        if not self.on:
            return
        with disk_errors(str(self.path)), self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every line but one that a kill or a full disk has torn; InputError where unreadable."""
        if not self.path.exists():
            return []
        lines: list[dict[str, Any]] = []
        try:
            for line in self.path.read_bytes().split(b"\n")[:-1]:
                lines.append(json.loads(line))
                lines[-1]["step"] += 0  # there, and a number
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{self.path}: line {len(lines) + 1} is not readable ({error}); mend or delete it"
            ) from error
        return lines


class _Rest(ProgressColumn):
    """What the trainer last reported, and the time the rest takes at the measured speed."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("report", ""), no_wrap=True, overflow="ellipsis")


class Live:
    """The progress line: a live one in a terminal, a plain line a report elsewhere."""

    def __init__(self, console: Console, steps: int, start: int):
        self.console = console
        self.bar = Progress(
            TextColumn("step {task.completed:>6}/{task.total}"),
            BarColumn(bar_width=8),
            _Rest(),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self.task = self.bar.add_task("train", total=steps, completed=start, report="")
        self.steps = steps

    def __enter__(self) -> "Live":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, step: int) -> None:
        self.bar.update(self.task, completed=step)

    def report(self, step: int, text: str) -> None:
        self.bar.update(self.task, completed=step, report=text)
        if not self.console.is_terminal:
            self.say(f"step {step:>6}/{self.steps} {text}")

    def say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
