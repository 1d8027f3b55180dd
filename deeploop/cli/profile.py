"""deeploop profile: measure a training step's time and memory by component."""

import dataclasses
import os
import time
from typing import Annotated

import tyro

from deeploop.cli.duration import since
from deeploop.cli.parse import ConfigArguments, base_config, first_word, parse
from deeploop.cli.ranks import on_every_rank, one_speaks, refuse_together
from deeploop.config.presets import SUMMARY
from deeploop.utils.console import open_console, say

# Read when torch is imported: its profiler reports its starts, and every block of memory that is
# older than the trace, on standard error.
QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclasses.dataclass
class ProfileArguments(ConfigArguments):
    warmup: Annotated[int, tyro.conf.arg(help="steps before the timed ones")] = 3
    traced: Annotated[int, tyro.conf.arg(help="steps under the profiler, after the timed ones")] = 1


def run(arguments: list[str]) -> int:
    with refuse_together():
        parsed = parse_profile(arguments)
    began = time.perf_counter()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from deeploop.analyze.profile import profile
    from deeploop.utils.distributed import init_distributed

    steps = profile.Steps(parsed.warmup, parsed.config.train.steps, parsed.traced)
    with init_distributed() as ranks, one_speaks(ranks):
        on_every_rank(ranks, lambda: parsed)  # a rank with refused options is in `refuse_together`
        console = open_console(quiet=not ranks.is_main)
        trainer = on_every_rank(
            ranks, lambda: profile.open_profile(parsed.config, steps, console, ranks)
        )
        for line in trainer.describe():
            say(console, line, indent=9)
        figures = profile.profile(trainer, steps)
    if ranks.is_main:
        profile.report(figures, trainer.folder, console)
        say(console, f"took     {since(began)}")
    return 0


def parse_profile(arguments: list[str]) -> ProfileArguments:
    """Read PRESET, overrides and the numbers of steps."""
    name, rest = first_word(arguments)
    base = base_config(name, rest).replace("train", steps=5, out="")
    return parse(
        ProfileArguments,
        args=rest,
        default=ProfileArguments(base),
        prog="deeploop profile [PRESET]",
        description="Time training steps, then split a traced one by component. --steps: how many "
        "are timed; --out: the folder, profiles/PRESET-RULE-TIME by default; tokens are random "
        f"unless --data names a corpus. Presets: {SUMMARY}.",
    )
