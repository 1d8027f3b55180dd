"""deeploop train: train a model, or go on with a run."""

import argparse
import dataclasses
import math
import signal
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from deeploop.cli.parse import first_word, named_preset, parse
from deeploop.cli.ranks import on_every_rank
from deeploop.config import Config
from deeploop.config.presets import SUMMARY
from deeploop.utils.console import say

if TYPE_CHECKING:  # torch is slow to import, and --help needs none of it
    from deeploop.train.trainer import Trainer


@dataclasses.dataclass
class TrainArguments:
    config: Annotated[Config, tyro.conf.arg(name="")]
    resume: Annotated[
        str | None,
        tyro.conf.arg(
            metavar="RUN",
            help="run folder or checkpoint to go on from; with --out, in a new folder",
        ),
    ] = None
    print_config: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="print the resolved configuration as JSON and stop"),
    ] = False


def parse_train(arguments: list[str]) -> TrainArguments:
    """Read PRESET and overrides; --resume without PRESET starts from the run's configuration."""
    name, rest = first_word(arguments)
    base = named_preset(name)
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--resume", nargs="?")  # tyro will refuse a missing value
    resume = early.parse_known_args(rest)[0].resume
    if resume is not None and name is None:
        from deeploop.runs.checkpoint import find

        base = find(resume).config.replace("train", out="")
    return parse(
        TrainArguments,
        args=rest,
        default=TrainArguments(base),
        prog="deeploop train [PRESET]",
        description=f"Train a looped language model. Presets: {SUMMARY}.",
    )


def run(arguments: list[str]) -> int:
    parsed = parse_train(arguments)
    if parsed.print_config:
        print(parsed.config.to_json(), end="")
        return 0
    from deeploop.runs import checkpoint
    from deeploop.train.setup import describe, open_run
    from deeploop.utils.distributed import init_distributed

    ckpt = None if parsed.resume is None else checkpoint.find(parsed.resume)
    with init_distributed() as ranks:
        console = Console(quiet=not ranks.is_main)
        trainer = on_every_rank(ranks, lambda: open_run(parsed.config, console, ckpt, ranks))
        if trainer is None:
            return 2
        for line in describe(trainer):
            say(console, line)
        if trainer.done == trainer.config.train.steps:
            console.print(f"already at step {trainer.done}; give more --steps to go on")
        summary = trainer.fit()
    if ranks.is_main:
        report(summary, trainer, console)
    return 128 + signal.Signals[summary["stopped_by"]] if "stopped_by" in summary else 0


def report(summary: dict[str, Any], trainer: "Trainer", console: Console) -> None:
    """Print the last lines: held-out loss beside that of n-gram counts, speed, and a sample."""
    if "stopped_by" in summary:
        say(
            console,
            f"stopped by {summary['stopped_by']} after step {summary['step']}, saved; go on with: "
            f"deeploop train --resume {trainer.folder}",
        )
        return
    if summary["sample"] is not None:
        say(console, f"sample   {summary['sample']!r}")
    per_byte = trainer.corpus.bytes_per_token
    unit = "bits/byte" if per_byte else "bits/token"
    scale = 1 / math.log(2) / (per_byte or 1)
    floors = ", ".join(f"{name} {nats * scale:.3f}" for name, nats in trainer.floors.items())
    say(console, f"held out {summary['val_loss'] * scale:.3f} {unit} (counts alone: {floors})")
    rate = summary["tokens_per_second"]
    speed = f"{rate:,.0f} tokens/s, " if rate else ""
    say(console, f"took     {speed}{summary['peak_memory_gib']:.2f} GiB peak")
