"""A run's folder: what is written beside the checkpoints, and the live progress line.

config.json     the resolved configuration
corpus.json     the corpus, its tokenizer and its n-gram floors
metrics.jsonl   a line each log_every steps and each validation
summary.json    the end of the run, or of its newest part
loss.png        training and held-out loss
checkpoints/    see deeploop.checkpoint
"""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from deeploop.config import Config
from deeploop.data import Corpus
from deeploop.errors import InputError
from deeploop.shards import disk_errors


def create(config: Config) -> Path:
    """Make the folder of a new run; raises InputError where it already holds one."""
    name = config.train.out or f"runs/{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(name).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            f"train.out={name!r}: already exists; choose another folder, or go on with "
            f"--resume {name}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"train.out={name!r}: cannot be made ({error.strerror})") from error
    return folder


def read_corpus(folder: Path) -> dict[str, Any]:
    """corpus.json of a run; raises InputError where it is missing or torn."""
    try:
        return dict(json.loads((folder / "corpus.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"run {folder}: corpus.json is not readable ({error})") from error


def write_json(path: Path, value: Any) -> None:
    with disk_errors(str(path)):
        path.write_text(json.dumps(value, indent=2) + "\n")


def start(folder: Path, config: Config, corpus: Corpus, floors: dict[str, float]) -> None:
    """Write what the run is of: config.json and corpus.json, and the tokenizer's files."""
    with disk_errors(f"run folder {folder}"):
        spec = corpus.tokenizer.save(folder) if corpus.tokenizer else None
        (folder / "config.json").write_text(config.to_json())
    write_json(
        folder / "corpus.json",
        {
            "name": corpus.name,
            "tokenizer": spec,
            "vocab_size": corpus.vocab_size,
            "train_tokens": len(corpus.train),
            "val_tokens": len(corpus.val),
            "floors_nats_per_token": floors,
        },
    )


class Metrics:
    """metrics.jsonl: one JSON object a line, flushed as it is written."""

    def __init__(self, folder: Path, start: int):
        """Keep the lines up to step `start`; what came later is trained again."""
        self.path = folder / "metrics.jsonl"
        old = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        kept = [line for line in old if line.endswith("\n") and json.loads(line)["step"] <= start]
        with disk_errors(str(self.path)):
            self.path.write_text("".join(kept))

    def write(self, **values: Any) -> None:
        with disk_errors(str(self.path)), self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


def plot_loss(metrics: list[dict[str, Any]], floors: dict[str, float], path: Path) -> None:
    """loss.png: training and held-out loss by step, in nats per token."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label in (("loss", "training"), ("val_loss", "held out")):
        points = [(m["step"], m[key]) for m in metrics if key in m]
        if points:
            axes.plot(
                *zip(*points, strict=True), label=label, marker="." if key == "val_loss" else ""
            )
    for name, nats in floors.items():
        axes.axhline(nats, linestyle=":", linewidth=1, color="grey")
        axes.annotate(name, (1, nats), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats per token")
    axes.legend()
    with disk_errors(str(path)):
        figure.savefig(path, dpi=120)


class _Rest(ProgressColumn):
    """What the trainer last reported, and the time the rest takes at the measured speed."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("report", ""))


class Live:
    """The progress line: a live one in a terminal, a plain line a report elsewhere."""

    def __init__(self, console: Console, steps: int, start: int):
        self.console = console
        self.bar = Progress(
            TextColumn("step {task.completed:>6}/{task.total}"),
            BarColumn(bar_width=20),
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
