"""deeploop convert: start a looped model from a trained one without loops."""

import dataclasses
import time
from typing import Annotated, Literal

import tyro

from deeploop.cli.duration import since
from deeploop.cli.parse import parse
from deeploop.utils.console import open_console, say


@dataclasses.dataclass
class ConvertArguments:
    run: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(help="run folder or checkpoint with model.loops=1", metavar="RUN"),
    ]
    loops: Annotated[int, tyro.conf.arg(help="loops R; must divide the run's blocks")]
    init: Annotated[
        Literal["stepwise", "average", "lower"],
        tyro.conf.arg(
            help="blocks that the shared ones start as: at equal intervals, the mean of those that "
            "become one, or the first"
        ),
    ] = "stepwise"
    rank: Annotated[
        int,
        tyro.conf.arg(
            help="rank of each loop's matrices, from what the shared ones lack; 0: none; d_model: "
            "full, the same model"
        ),
    ] = 0
    out: Annotated[
        str, tyro.conf.arg(help="folder of the new run; empty: runs/PRESET-RULE-TIME")
    ] = ""


def run(arguments: list[str]) -> int:
    parsed = parse(
        ConvertArguments,
        args=arguments,
        prog="deeploop convert",
        description="Turn the model of a run without loops into a looped one, as the first "
        "checkpoint of a new run (Relaxed Recursive Transformers, arXiv 2410.20672).",
    )
    from deeploop.model.looplm import count_parameters
    from deeploop.train.convert import convert

    began = time.perf_counter()
    made = convert(**dataclasses.asdict(parsed))
    m = made.model.config
    adapters = f", LoRA rank {m.lora_rank} in each loop" if m.lora_rank else ""
    console = open_console()
    say(
        console,
        f"model    {m.n_layers} blocks x {m.loops} loops{adapters}, "
        f"{count_parameters(made.model):,} parameters of {made.parameters_before:,} before",
    )
    say(console, f"run      {made.folder}")
    say(
        console,
        f"go on    deeploop train --resume {made.folder} --train.teacher {parsed.run}",
    )
    say(console, f"took     {since(began)}")
    return 0
