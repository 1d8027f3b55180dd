"""deeploop diagnose: measure how far the gradients of a shared weight's visits align."""

import dataclasses
import time
from typing import Annotated

import tyro

from deeploop.cli.duration import since
from deeploop.cli.parse import ConfigArguments, first_word, named_config, parse, refuse_flag
from deeploop.config.presets import SUMMARY
from deeploop.utils.console import open_console, say
from deeploop.utils.errors import InputError
from deeploop.utils.launcher import place


@dataclasses.dataclass
class DiagnoseArguments(ConfigArguments):
    probes: Annotated[int, tyro.conf.arg(help="random probes of the Jacobian, a backward each")] = 4
    sequences: Annotated[
        int, tyro.conf.arg(help="held-out sequences; 0: the run's micro-batch")
    ] = 0
    draw: Annotated[int, tyro.conf.arg(help="seed of the held-out sequences and the probes")] = 0


def run(arguments: list[str]) -> int:
    name, rest = first_word(arguments)
    refuse_flag(rest, "--batch-size", "a diagnosis takes --sequences")
    base, run_path = named_config(name, rest)
    base = base.replace("train", out="")
    parsed = parse(
        DiagnoseArguments,
        args=rest,
        default=DiagnoseArguments(base),
        prog="deeploop diagnose [RUN|PRESET]",
        description="Measure the gradients of each visit separately, kappa_R, the stream and the "
        "size of the next update: for a preset at initialisation, or for a run at initialisation "
        "and at each checkpoint that it has (train.keep 0 keeps all; train.save-every says how "
        "often). diagnose.json and diagnose.png go to the run's folder or to --out, over those of "
        "an earlier diagnosis; without RUN and --out to runs/PRESET-RULE-TIME. "
        f"Presets: {SUMMARY}.",
    )
    from deeploop.analyze.diagnose.diagnose import checkpoints, diagnose

    if place().world > 1:
        raise InputError("WORLD_SIZE is over 1: a diagnosis takes one process; leave torchrun out")
    console, began = open_console(), time.perf_counter()
    diagnose(
        parsed.config,
        [] if run_path is None else checkpoints(run_path),
        console,
        probes=parsed.probes,
        sequences=parsed.sequences,
        draw=parsed.draw,
    )
    say(console, f"took     {since(began)}")
    return 0
