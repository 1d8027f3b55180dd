"""Represent encoded text, clean text, and refuse what a tokenizer cannot read or encode."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from deeploop.utils.errors import InputError
from deeploop.utils.foreign import foreign

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
KINDS = "byte, gpt2, gpt2:DIR, gpt2:VOCAB,MERGES or a path to a tokenizer.json"
MAX_FILE = 1 << 28  # bytes of a tokenizer's file; the largest published ones have 35 MB
MAX_VOCAB = 1 << 24  # ids: far more than any tokenizer has, so a larger number is damage


class Encoded(NamedTuple):
    """Token ids of a text, and the bytes of the text that they stand for.

    The bytes are in UTF-8. Text that the tokenizer drops or replaces by its unknown token
    is not among them: nobody who predicts the ids has predicted it.
    """

    ids: np.ndarray
    bytes: int


def clean(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def encoding(spec: str, what: str = "encode this text") -> AbstractContextManager[None]:
    """Return a context that refuses, naming the tokenizer, what its library cannot encode."""
    return foreign(
        f"tokenizer {spec!r}",
        "give one with an unknown token, or a byte-level one",
        f"cannot {what}",
    )


def reading(spec: str) -> AbstractContextManager[None]:
    """Return a context that refuses, naming the tokenizer, a file its library cannot read."""
    return foreign(f"tokenizer {spec!r}", f"give {KINDS}", "could not be read")


def require(package: str, spec: str, what: str = "tokenizer") -> Any:
    """Import an optional package; raises InputError with the install command if absent."""
    try:
        return __import__(package)
    except ImportError as error:
        raise InputError(
            f"{what} {spec!r} needs the package {package}: pip install 'deeploop[data]'"
        ) from error
