"""deeploop data: tokenise text into shards, or compare shards with their checksums.

With sudoku, maze or arc as the first word: write a puzzle data set (`data_puzzles`).
"""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import tyro

from deeploop.cli import data_puzzles
from deeploop.cli.duration import since
from deeploop.cli.parse import Switch, parse
from deeploop.utils.console import open_console, say
from deeploop.utils.errors import InputError


@dataclasses.dataclass
class DataArguments:
    input: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(
            help="text, .jsonl, .csv or .parquet (also .gz, .zst), or a folder of them",
            metavar="INPUT",
        ),
    ]
    out: Annotated[
        tyro.conf.Positional[str],
        tyro.conf.arg(help="folder for the shards; with --verify none", metavar="OUT"),
    ] = ""
    tokenizer: Annotated[
        str,
        tyro.conf.arg(
            help="byte, gpt2, gpt2:DIR, or a tokenizer.json; auto: gpt2 for text, for shards "
            "the one they name"
        ),
    ] = "auto"
    text_field: Annotated[str, tyro.conf.arg(help="field or column that holds the text")] = "text"
    val_fraction: Annotated[
        float, tyro.conf.arg(help="fraction held out, from the end; 0: none")
    ] = 0.01
    shard_tokens: Annotated[int, tyro.conf.arg(help="tokens per shard")] = 100_000_000
    verify: Annotated[
        Switch,
        tyro.conf.arg(help="write nothing; compare shards of any size with their checksums"),
    ] = False


def run(arguments: list[str]) -> int:
    if arguments and arguments[0] in data_puzzles.KINDS:
        return data_puzzles.run(arguments[0], arguments[1:])
    parsed = parse(
        DataArguments,
        args=arguments,
        prog="deeploop data",
        description="Tokenise text into llm.c token shards. deeploop data sudoku, maze or arc "
        "writes a puzzle data set, and has a --help of its own; a text of such a name is ./maze.",
    )
    from deeploop.data.corpus import is_shards, load_corpus
    from deeploop.data.prepare import prepare

    began = time.perf_counter()
    options, console = dataclasses.asdict(parsed), open_console()
    if options.pop("verify"):
        corpus = load_corpus(parsed.input, parsed.tokenizer, verify=True)
        say(console, f"{parsed.input}: {corpus.describe()}")
        return 0
    if not parsed.out:
        raise InputError("OUT is missing; give a folder for the shards, or --verify")
    if parsed.tokenizer == "auto" and not is_shards(Path(parsed.input).expanduser()):
        options["tokenizer"] = "gpt2"
    meta = prepare(**options)
    if meta["note"]:
        say(console, meta["note"])
    tokens = meta["tokens"]
    say(
        console,
        f"{parsed.out}: {len(meta['shards'])} shards, {tokens['train']:,} training and "
        f"{tokens['val']:,} held-out tokens of a vocabulary of {meta['vocab_size']:,}; "
        f"go on with: deeploop train --data {parsed.out}",
    )
    say(console, f"took     {since(began)}")
    return 0
