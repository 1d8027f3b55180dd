"""deeploop generate: continue a text with a trained model."""

import dataclasses
from typing import Annotated

import tyro

from deeploop.cli.parse import parse


@dataclasses.dataclass
class GenerateArguments:
    run: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(help="run folder or checkpoint", metavar="RUN")
    ]
    prompt: Annotated[str, tyro.conf.arg(help="text to continue; FILE:path reads a file")]
    tokens: Annotated[int, tyro.conf.arg(help="tokens to add")] = 200
    temperature: Annotated[float, tyro.conf.arg(help="0 is greedy")] = 0.8
    top_k: Annotated[int, tyro.conf.arg(help="choose among the k likeliest; 0: among all")] = 0
    num_samples: Annotated[int, tyro.conf.arg(help="continuations to print")] = 1
    loops: Annotated[int, tyro.conf.arg(help="loops to run; 0: as trained")] = 0
    seed: Annotated[int, tyro.conf.arg(help="seed of the draw")] = 0
    tokenizer: Annotated[
        str, tyro.conf.arg(help="of the token shards, where these named none; empty: the run's")
    ] = ""
    device: Annotated[str, tyro.conf.arg(help="auto, cpu, cuda or cuda:N")] = "auto"


def run(arguments: list[str]) -> int:
    parsed = parse(
        GenerateArguments,
        args=arguments,
        prog="deeploop generate",
        description="Continue a text with a trained model.",
    )
    from deeploop.eval.generate import generate

    for text in generate(**dataclasses.asdict(parsed)):
        print(text)
    return 0
