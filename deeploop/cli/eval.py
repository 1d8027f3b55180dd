"""deeploop eval: measure a run after different numbers of loops."""

import dataclasses
import time
from typing import Annotated

import tyro

from deeploop.cli.duration import since
from deeploop.cli.parse import parse
from deeploop.utils.console import open_console, say
from deeploop.utils.errors import InputError
from deeploop.utils.launcher import place


@dataclasses.dataclass
class EvalArguments:
    run: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(help="run folder or checkpoint", metavar="RUN")
    ]
    loops: Annotated[
        str,
        tyro.conf.arg(
            help="lines of the table, such as 1,2,8 or 1..8 or 1,2,4..32; every loop up to the "
            "largest is measured; empty: up to twice the loops in training"
        ),
    ] = ""
    tokens: Annotated[
        int | None,
        tyro.conf.arg(help="held-out tokens to predict; 0: all; None: the run's eval-tokens"),
    ] = None
    batch_size: Annotated[
        int, tyro.conf.arg(help="sequences at once; 0: the run's micro-batch")
    ] = 0
    data: Annotated[
        str, tyro.conf.arg(help="text or shards, whose held-out part is read; empty: the run's")
    ] = ""
    difficulty: Annotated[
        str, tyro.conf.arg(help="of a task's examples, such as 8 or 4-6; empty: the run's")
    ] = ""
    starts: Annotated[
        int,
        tyro.conf.arg(
            help="compare the end states from so many starts: draws of the noise, or end states "
            "of other sequences; 0: do not"
        ),
    ] = 0
    device: Annotated[str, tyro.conf.arg(help="auto, cpu, cuda or cuda:N")] = "auto"
    out: Annotated[
        str,
        tyro.conf.arg(
            help="folder, or path of the files without .json and .png; empty: the run's folder"
        ),
    ] = ""


def run(arguments: list[str]) -> int:
    parsed = parse(
        EvalArguments,
        args=arguments,
        prog="deeploop eval",
        description="Measure a run after each of its loops, and more, in one pass over held-out "
        "text: loss, change of the stream, entropy and divergence of the next token, and the "
        "loops and loss of rules by which a token could leave early.",
    )
    from deeploop.analyze.evaluate import evaluate

    if place().world > 1:
        raise InputError("WORLD_SIZE is over 1: eval takes one process; leave torchrun out")
    console, began = open_console(), time.perf_counter()
    evaluate(console=console, **dataclasses.asdict(parsed))
    say(console, f"took     {since(began)}")
    return 0
