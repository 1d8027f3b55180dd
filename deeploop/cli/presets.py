"""deeploop presets: list the named configurations."""

import dataclasses
from typing import Annotated

import tyro

from deeploop.cli.parse import Switch, parse
from deeploop.config.presets import LOOM_ABLATIONS
from deeploop.utils.console import open_console, print_whole, say


@dataclasses.dataclass
class PresetsArguments:
    all: Annotated[Switch, tyro.conf.arg(help="also the variants of presets")] = False


def run(arguments: list[str]) -> int:
    parsed = parse(
        PresetsArguments,
        args=arguments,
        prog="deeploop presets",
        description="List the named configurations: paper, parameters, loops and sizes.",
    )
    from deeploop.analyze.presets import table

    console = open_console()
    print_whole(console, table(parsed.all))
    if not parsed.all:
        variants = ", ".join(f"-{name}" for name in LOOM_ABLATIONS)
        say(console, f"Each loom also with -released or an ablation: {variants}; see --all.")
    return 0
