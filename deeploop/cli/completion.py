"""deeploop completion: print a script that completes verbs and options in a shell."""

import dataclasses
import importlib
from typing import Annotated, Any, Literal, Union

import tyro

from deeploop.cli.parse import parse

# By verb, the dataclass of its options, in the verb's own module.
OPTIONS = {
    "train": "TrainArguments", "generate": "GenerateArguments", "eval": "EvalArguments",
    "data": "DataArguments",
    "profile": "ProfileArguments", "diagnose": "DiagnoseArguments", "plan": "PlanArguments",
    "presets": "PresetsArguments", "compare": "CompareArguments",
    "convert": "ConvertArguments", "completion": "CompletionArguments",
}  # fmt: skip


@dataclasses.dataclass
class CompletionArguments:
    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]


def run(arguments: list[str]) -> int:
    parsed = parse(
        CompletionArguments,
        args=arguments,
        prog="deeploop completion",
        description="Print a script that completes verbs and options; for bash: "
        'eval "$(deeploop completion bash)" in ~/.bashrc.',
    )
    verbs: Any = Union[tuple(  # noqa: UP007
        Annotated[
            getattr(importlib.import_module(f"deeploop.cli.{verb}"), kind),
            tyro.conf.subcommand(verb, description=""),
        ]
        for verb, kind in OPTIONS.items()
    )]  # fmt: skip
    tyro.cli(verbs, prog="deeploop", args=["--tyro-print-completion", parsed.shell])
    raise AssertionError("unreachable: tyro exits once it has printed the script")
