"""Fields of the corpus."""

from dataclasses import dataclass
from typing import Annotated

from deeploop.config.fields import FRACTION, flag


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    path: Annotated[
        str,
        flag(
            "text, .jsonl, .parquet, or a file or folder of .bin token shards; "
            "empty: the help topics every CPython ships",
            "--data",
        ),
    ] = ""
    tokenizer: Annotated[
        str, flag("byte, gpt2, gpt2:DIR with vocab.json and merges.txt, or a tokenizer.json")
    ] = "byte"
    text_field: Annotated[str, flag("field or column that holds the text")] = "text"
    val_fraction: Annotated[
        float, flag("fraction of a text corpus held out, from its end"), FRACTION
    ] = 0.1
