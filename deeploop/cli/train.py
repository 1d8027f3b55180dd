"""deeploop train: train a model, or go on with a run."""

import dataclasses
import math
import signal
import time
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from deeploop.cli.duration import since
from deeploop.cli.parse import ConfigArguments, Switch, base_config, early_option, first_word, parse
from deeploop.cli.ranks import is_main_process, on_every_rank, one_speaks, refuse_together
from deeploop.config.presets import SUMMARY
from deeploop.utils.console import open_console, printable, say, say_error

if TYPE_CHECKING:  # torch is slow to import, and --help needs none of it
    from rich.console import Console

    from deeploop.train.trainer import Trainer


INDENT = 9  # columns of a line's first word, such as "model    "


@dataclasses.dataclass
class TrainArguments(ConfigArguments):
    resume: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="RUN",
            help="run folder or checkpoint to go on from; with --out, in a new folder",
        ),
    ] = None
    print_config: Annotated[
        Switch, tyro.conf.arg(help="print the resolved configuration as JSON and stop")
    ] = False


def parse_train(arguments: list[str]) -> TrainArguments:
    """Read PRESET or --config and overrides; with --resume alone, those of its configuration."""
    name, rest = first_word(arguments)
    base = base_config(name, rest)
    resume = early_option(rest, "--resume")
    if resume is not None and name is None and early_option(rest, "--config") is None:
        from deeploop.runs.checkpoint import find

        base = find(resume, begin=True).config.replace("train", out="")
    return parse(
        TrainArguments,
        args=rest,
        default=TrainArguments(base),
        prog="deeploop train [PRESET]",
        description=f"Train a looped language model. Presets: {SUMMARY}.",
    )


def run(arguments: list[str]) -> int:
    began = time.perf_counter()
    with refuse_together():
        parsed = parse_train(arguments)
    if parsed.print_config:
        if is_main_process():
            print(parsed.config.to_json(), end="")
        return 0
    from deeploop.runs import checkpoint
    from deeploop.train.setup import open_run
    from deeploop.utils.distributed import init_distributed

    with init_distributed() as ranks, one_speaks(ranks):
        on_every_rank(ranks, lambda: parsed)  # a rank with refused options is in `refuse_together`
        console = open_console(quiet=not ranks.is_main)

        def build() -> "Trainer":
            ckpt = None if parsed.resume is None else checkpoint.find(parsed.resume, begin=True)
            return open_run(parsed.config, console, ckpt, ranks)

        trainer = on_every_rank(ranks, build)
        for line in trainer.describe():
            say(console, line, indent=INDENT)
        if trainer.done == trainer.config.train.steps:
            say(console, f"already at step {trainer.done}; give more --steps to go on")
        summary = trainer.fit()
    if ranks.is_main:
        report(summary, trainer, console, since(began))
    return 128 + signal.Signals[summary["stopped_by"]] if "stopped_by" in summary else 0


def report(summary: dict[str, Any], trainer: "Trainer", console: "Console", duration: str) -> None:
    """Print the last lines: held-out loss beside that of n-gram counts, speed, and a sample."""
    if "stopped_by" in summary:
        # On standard error: after Ctrl-C the reader of a pipe has gone, too.
        say_error(
            f"stopped by {summary['stopped_by']} after step {summary['step']}, saved; go on with: "
            f"deeploop train --resume {trainer.folder}"
        )
        return
    if summary.get("sample") is not None:
        text = "\n".join(printable(summary["sample"]).splitlines())
        say(console, "sample   " + text.replace("\n", "\n" + " " * INDENT))
    say(console, f"held out {held_out(summary, trainer)}", indent=INDENT)
    rate = summary["tokens_per_second"]
    speed = f"{rate:,.0f} tokens/s, " if rate else ""
    say(console, f"took     {duration}, {speed}{summary['peak_memory_gib']:.2f} GiB peak")


def held_out(summary: dict[str, Any], trainer: "Trainer") -> str:
    """Return the held-out loss, beside that of simple guesses; of a task also the accuracy."""
    corpus, loss = trainer.corpus, summary["val_loss"]
    per_byte, floors, figures = corpus.bytes_per_token, trainer.floors, ""
    if corpus.answers:
        unit, scale, floor = "nats/answer", 1.0, ""
        figures = f", accuracy {summary['val_accuracy']:.3f}"
        figures += f" ({summary['val_token_accuracy']:.3f} of answers)"
    else:
        unit, floor = "bits/byte" if per_byte else "bits/token", "counts alone: "
        scale = 1 / math.log(2) / (per_byte or 1)
    simple = ", ".join(f"{name} {nats * scale:.3f}" for name, nats in floors.items())
    targets, every = summary["val_tokens"], corpus.held_out_targets
    cut = f" on the first {targets:,} of {every:,} tokens" if targets < every else ""
    value = summary["val_bits_per_byte"] if per_byte else loss * scale
    return f"{value:.3f} {unit}{figures}{cut} ({floor}{simple})"
