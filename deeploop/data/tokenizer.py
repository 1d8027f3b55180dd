"""Encode text as tokens and decode tokens as text.

=====================  ======================================================  ==========
spec                   tokenizer                                               needs
=====================  ======================================================  ==========
``byte``               bytes: vocabulary 256, no end-of-text token             nothing
``gpt2``               GPT-2's BPE, fetched once and cached by tiktoken        tiktoken
``gpt2:DIR``           the same from DIR's vocab.json and merges.txt           tokenizers
``gpt2:VOCAB,MERGES``  the same from two named files                           tokenizers
``PATH.json``          any Hugging Face tokenizers file (or its folder)        tokenizers
``PATH.pkl``           nanoGPT's characters (`deeploop.data.characters`)       nothing
``auto``               for token shards the one they name; for text ``byte``   nothing
=====================  ======================================================  ==========

Special tokens are never recognised in text: a document that contains
``<|endoftext|>`` is encoded as those characters. `deeploop.data.text` puts the
end-of-text id before each document.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from deeploop.data import characters, cuts
from deeploop.data.encoded import KINDS, Encoded, clean, encoding, require
from deeploop.data.file_tokenizer import load_file, load_gpt2_files
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError


class Tokenizer(Protocol):
    """The interface of a tokenizer in the other modules.

    ``decode`` never raises: invalid UTF-8 and ids outside the vocabulary (a padded output
    layer can sample them) become U+FFFD. ``fingerprint`` differs between two tokenizers
    that could encode the same text differently. ``spec`` loads it again, and ``eot`` is
    the id of the end-of-text token. ``cuts`` matches where a text may be cut so that its
    spans encode to the tokens of the whole; None: nowhere.
    """

    name: str
    spec: str
    vocab_size: int
    eot: int | None
    fingerprint: str
    cuts: re.Pattern[str] | None

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def byte_lengths(self) -> np.ndarray | None:
        """Return the UTF-8 bytes each id decodes to, int64 [vocab_size]; special tokens have 0.

        None where the number depends on the ids around it, as with WordPiece.
        """
        ...

    def save(self, folder: Path) -> str:
        """Write the tokenizer's files to ``folder``; returns the spec that loads it from there."""
        ...


class ByteTokenizer:
    """Each byte is a token.

    A byte that was decoded with the error handler "surrogateescape", because it is not
    UTF-8, is encoded as itself.
    """

    name = spec = fingerprint = "byte"
    vocab_size = 256
    eot: int | None = None
    cuts: re.Pattern[str] | None = cuts.ANYWHERE

    def encode(self, text: str) -> list[int]:
        return list(self._bytes(text))

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        rows = [np.frombuffer(self._bytes(text), np.uint8) for text in texts]
        return [Encoded(row, len(row)) for row in rows]

    def _bytes(self, text: str) -> bytes:
        try:
            return text.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            return clean(text).encode()

    def decode(self, ids: Iterable[int]) -> str:
        # 0xFF never occurs in UTF-8, so an id that is not a byte decodes to U+FFFD.
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode(errors="replace")

    def byte_lengths(self) -> np.ndarray | None:
        return np.ones(256, np.int64)

    def save(self, folder: Path) -> str:
        return self.spec


class GPT2Tokenizer:
    """GPT-2's BPE in tiktoken: 50257 tokens, the last of them the end of text."""

    name = spec = fingerprint = "gpt2"
    cuts: re.Pattern[str] | None = cuts.AT_WORDS

    def __init__(self) -> None:
        tiktoken = require("tiktoken", "gpt2")
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on any error of the network
            raise InputError(
                f"tokenizer 'gpt2' could not be fetched ({type(error).__name__}); connect once, or "
                "give local files as gpt2:DIR, a folder with vocab.json and merges.txt"
            ) from error
        self.vocab_size: int = self._bpe.n_vocab
        self.eot: int | None = self._bpe.eot_token

    def encode(self, text: str) -> list[int]:
        with encoding(self.spec):
            return self._bpe.encode_ordinary(clean(text))

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        texts = [clean(text) for text in texts]
        with encoding(self.spec):
            rows = self._bpe.encode_ordinary_batch(texts)
        return [
            Encoded(np.asarray(row, np.uint32), len(text.encode()))
            for row, text in zip(rows, texts, strict=True)
        ]

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(
            self._bpe.decode_single_token_bytes(i) if 0 <= i < self.vocab_size else b"\xff"
            for i in ids
        ).decode(errors="replace")

    def byte_lengths(self) -> np.ndarray | None:
        lengths = [len(self._bpe.decode_single_token_bytes(i)) for i in range(self.vocab_size)]
        lengths[self._bpe.eot_token] = 0
        return np.array(lengths, np.int64)

    def save(self, folder: Path) -> str:
        return self.spec


def load_tokenizer(spec: str, folder: Path | None = None) -> Tokenizer:
    """Load the tokenizer of a spec from the table at the top of this module.

    A relative path is searched in ``folder`` first, if given: shards and runs have their
    tokenizer's file in their folder. Raises InputError where the spec is of no known kind,
    a file is missing or malformed, or a package is not installed.
    """
    if spec in ("byte", "auto"):
        return ByteTokenizer()
    if spec == "gpt2":
        return GPT2Tokenizer()
    if spec.startswith("gpt2:"):
        return load_gpt2_files(spec)
    path = user_path(spec, "tokenizer")
    if folder and (folder / spec).exists():
        path = folder / spec
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.exists():
        raise InputError(f"tokenizer {spec!r} is neither a known kind nor a file; give {KINDS}")
    if path.suffix == ".pkl" or path.name == characters.FILE:
        return characters.load(path)
    return load_file(path, spec)
