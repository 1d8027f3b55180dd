"""deeploop compare: set runs side by side."""

import dataclasses
from typing import Annotated

import tyro

from deeploop.cli.parse import parse
from deeploop.utils.console import open_console, print_whole, say


@dataclasses.dataclass
class CompareArguments:
    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(help="folders of runs", metavar="RUN")
    ]
    out: Annotated[str, tyro.conf.arg(help="the picture's file; one there is replaced")] = (
        "compare.png"
    )


def run(arguments: list[str]) -> int:
    parsed = parse(
        CompareArguments,
        args=arguments,
        prog="deeploop compare",
        description="Compare runs: a table of their held-out loss, speed, size and the fields in "
        "which they differ, and a picture of their losses by step.",
    )
    from deeploop.analyze.compare import draw, read_runs, table

    runs = read_runs(parsed.runs)
    path = draw(runs, parsed.out)
    console = open_console()
    print_whole(console, table(runs))
    say(console, f"picture  {path}")
    return 0
