"""deeploop profile: measure a training step's time and memory by component."""

import dataclasses
from typing import Annotated

import tyro
from rich.console import Console

from deeploop.cli.parse import first_word, named_preset, parse
from deeploop.cli.ranks import on_every_rank
from deeploop.config import Config
from deeploop.config.presets import SUMMARY
from deeploop.utils.console import say


@dataclasses.dataclass
class ProfileArguments:
    config: Annotated[Config, tyro.conf.arg(name="")]
    warmup: Annotated[int, tyro.conf.arg(help="steps before the timed ones")] = 3
    traced: Annotated[int, tyro.conf.arg(help="steps under the profiler, after the timed ones")] = 1


def run(arguments: list[str]) -> int:
    name, rest = first_word(arguments)
    base = named_preset(name).replace("train", steps=5)
    parsed = parse(
        ProfileArguments,
        args=rest,
        default=ProfileArguments(base),
        prog="deeploop profile [PRESET]",
        description="Time training steps, then split a traced one by component. --steps: how many "
        "are timed; --out: the folder, profiles/PRESET-TIME by default; tokens are random unless "
        f"--data names a corpus. Presets: {SUMMARY}.",
    )
    from deeploop.analyze.profile import profile
    from deeploop.train import setup
    from deeploop.utils.distributed import init_distributed

    steps = profile.Steps(parsed.warmup, parsed.config.train.steps, parsed.traced)
    with init_distributed() as ranks:
        console = Console(quiet=not ranks.is_main)
        trainer = on_every_rank(
            ranks, lambda: profile.open_profile(parsed.config, steps, console, ranks)
        )
        if trainer is None:
            return 2
        for line in setup.describe(trainer):
            say(console, line)
        figures = profile.profile(trainer, steps)
    if ranks.is_main:
        profile.report(figures, trainer.folder, console)
    return 0
