"""Fields of the corpus."""

from dataclasses import dataclass
from typing import Annotated

from deeploop.config.fields import FRACTION, MAY_CHANGE, check_fields, flag


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from.

    A resumed run may name another place of the same text: the tokens are compared.
    """

    path: Annotated[
        str,
        flag(
            "text, .jsonl, .csv, .parquet (also .gz, .zst), or a file or folder of .bin token "
            "shards; empty: the help topics every CPython ships",
            "--data",
        ),
        MAY_CHANGE,
    ] = ""
    tokenizer: Annotated[
        str,
        flag(
            "auto (byte for text, for shards the one they name), byte, gpt2, gpt2:DIR with "
            "vocab.json and merges.txt, or a tokenizer.json"
        ),
        MAY_CHANGE,
    ] = "auto"
    text_field: Annotated[str, flag("field or column that holds the text"), MAY_CHANGE] = "text"
    val_fraction: Annotated[
        float,
        flag("fraction of a text corpus held out, from its end, where no file is called val"),
        FRACTION,
        MAY_CHANGE,
    ] = 0.1
    verify: Annotated[
        bool, flag("compare checksums of cached text and shards of any size"), MAY_CHANGE
    ] = False

    def __post_init__(self) -> None:
        check_fields(self, "data.")
