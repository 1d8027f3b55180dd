"""deeploop data: tokenise text into shards."""

import dataclasses
import time
from typing import Annotated

import tyro

from deeploop.cli.duration import since
from deeploop.cli.parse import parse
from deeploop.utils.console import open_console, say


@dataclasses.dataclass
class DataArguments:
    input: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(help=".txt, .jsonl or .parquet, or a folder of them", metavar="INPUT"),
    ]
    out: Annotated[
        tyro.conf.Positional[str], tyro.conf.arg(help="folder for the shards", metavar="OUT")
    ]
    tokenizer: Annotated[str, tyro.conf.arg(help="byte, gpt2, gpt2:DIR, or a tokenizer.json")] = (
        "gpt2"
    )
    text_field: Annotated[str, tyro.conf.arg(help="field or column that holds the text")] = "text"
    val_fraction: Annotated[float, tyro.conf.arg(help="fraction held out, from the end")] = 0.01
    shard_tokens: Annotated[int, tyro.conf.arg(help="tokens per shard")] = 100_000_000


def run(arguments: list[str]) -> int:
    parsed = parse(
        DataArguments,
        args=arguments,
        prog="deeploop data",
        description="Tokenise text into llm.c token shards.",
    )
    from deeploop.data.prepare import prepare

    began = time.perf_counter()
    meta = prepare(**dataclasses.asdict(parsed))
    tokens = meta["tokens"]
    console = open_console()
    say(
        console,
        f"{parsed.out}: {len(meta['shards'])} shards, {tokens['train']:,} training and "
        f"{tokens['val']:,} held-out tokens of a vocabulary of {meta['vocab_size']:,}; "
        f"go on with: deeploop train --data {parsed.out}",
    )
    say(console, f"took     {since(began)}")
    return 0
