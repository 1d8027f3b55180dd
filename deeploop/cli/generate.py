"""deeploop generate: continue a text with a trained model."""

import dataclasses
import sys
import time
from typing import Annotated

import tyro

from deeploop.cli.duration import since
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
        description="Continue a text with a trained model. The texts go to standard output, with a "
        "line before each where there are several; notes go to standard error.",
    )
    from deeploop.eval.generate import continue_prompt
    from deeploop.utils.console import print_generated, say_error

    began = time.perf_counter()
    made = continue_prompt(**dataclasses.asdict(parsed))
    duration = since(began)
    for i, text in enumerate(made.texts):
        if len(made.texts) > 1:
            print(f"--- sample {i + 1} of {len(made.texts)} ---")
        print_generated(text)
    # Notes go to standard error, so that a file of the output has the texts alone.
    sys.stdout.flush()
    if made.prompt > made.window:
        say_error(
            f"prompt   {made.prompt:,} tokens, of which the model reads the last {made.window:,} "
            "(its seq_len)"
        )
    tokens = f"up to {made.longest - made.prompt:,} tokens"
    say_error(f"took     {duration}, {tokens} a sample")
    return 0
