"""deeploop plan: predict memory, time and hours of a run."""

import dataclasses
from typing import Annotated

import tyro

from deeploop.cli.parse import ConfigArguments, Switch, first_word, named_config, parse, refuse_flag
from deeploop.config import Config
from deeploop.config.model import MODELS
from deeploop.config.presets import preset, presets
from deeploop.utils.errors import InputError


@dataclasses.dataclass
class PlanArguments(ConfigArguments):
    device: Annotated[
        str,
        tyro.conf.arg(help="h200, h100, a100, b200, or cpu (this machine, measured)"),
    ] = "h200"
    all: Annotated[Switch, tyro.conf.arg(help="a line for every preset")] = False
    matrix: Annotated[
        Switch, tyro.conf.arg(help="DeepLoop's 16 runs and their sum, beside the paper's")
    ] = False
    json: Annotated[Switch, tyro.conf.arg(help="print JSON")] = False


def run(arguments: list[str]) -> int:
    name, rest = first_word(arguments)
    refuse_flag(rest, "--train.device", "a plan takes --device h200, h100, a100, b200 or cpu")
    if name is None and "--matrix" in rest:
        base = preset("gpt2-small-r1-baseline")
    else:
        base, _ = named_config(name, rest)
    parsed = parse_plan(rest, base)
    several = parsed.all or parsed.matrix
    if several and (name is not None or parsed.config_file is not None):
        raise InputError(
            f"{name or '--config'!r}: --all and --matrix choose their own; leave it out"
        )
    from deeploop.analyze.plan import report

    if not several:
        report.show(parsed.config, parsed.device, parsed.json)
        return 0
    named = [c for c in presets().values() if not MODELS[c.model.kind].puzzles]
    configs = report.matrix() if parsed.matrix else named
    of_plan = {"--all", "--matrix", "--json", "--device"}
    if any(word.startswith("--") and word.split("=")[0] not in of_plan for word in rest):
        configs = [parse_plan(rest, config).config for config in configs]
    report.show_many(configs, parsed.device, parsed.json, total=parsed.matrix)
    return 0


def parse_plan(arguments: list[str], base: Config) -> PlanArguments:
    """Read the options of `plan` and the overrides of a configuration."""
    try:
        return parse(
            PlanArguments,
            args=arguments,
            default=PlanArguments(base),
            prog="deeploop plan [PRESET|RUN]",
            description="Predict memory, time and hours of a run; no GPU is needed, nothing "
            "allocated. The configuration is a preset's or, given a run's folder or a checkpoint, "
            "that of the run, with its precision; --device is the device to predict for.",
        )
    except InputError as error:
        if not {"--all", "--matrix"} & set(arguments):
            raise
        raise InputError(f"{base.preset}: {error}") from None
