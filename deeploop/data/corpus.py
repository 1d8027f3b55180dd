"""From a path to a corpus, and from a corpus to shards.

A corpus is two streams of tokens, ``train`` and ``val``. Text for the byte
tokenizer and ready token shards are read in place; any other text is tokenised
once into shards in a cache folder. Nothing is ever held whole in memory, so a
corpus may be larger than it. `deeploop.data.batches` makes batches of the streams.
"""

import dataclasses
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.shards import (
    ArraySegment,
    FileSegment,
    Segment,
    TokenStream,
    open_shards,
)
from deeploop.data.text import Piece, encode_to, split_text, text_files
from deeploop.data.token_cache import Progress, _tokenised, default_cache
from deeploop.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError

ASSUMED_VOCAB = {"<u2": 50257, "<u4": 128256}  # GPT-2 and Llama 3, whose layouts they are
COUNTED = 1 << 24  # tokens of val whose bytes are counted where shards do not say


@dataclass(frozen=True)
class Corpus:
    """Two streams of tokens and what is known about them.

    ``tokenizer`` is None for shards that name none. ``train_bytes`` and
    ``val_bytes`` count the UTF-8 the tokens stand for, None where unknown; end-of-
    text tokens stand for none, so that loss over bytes charges for predicting them.
    For long shards that do not say, ``val_bytes`` is estimated from the first part.
    """

    name: str
    train: TokenStream
    val: TokenStream
    vocab_size: int
    tokenizer: Tokenizer | None = None
    train_bytes: int | None = None
    val_bytes: int | None = None
    note: str = ""

    @property
    def bytes_per_token(self) -> float | None:
        """Of val: bits per byte are loss / ln 2 / bytes_per_token."""
        return self.val_bytes / len(self.val) if self.val_bytes and len(self.val) else None

    def describe(self) -> str:
        """One line for the head of a log."""
        parts = [
            f"{self.name}: {len(self.train):,} train and {len(self.val):,} val tokens",
            f"tokenizer {self.tokenizer.name if self.tokenizer else 'none'}",
            f"vocabulary {self.vocab_size:,}",
        ]
        if self.bytes_per_token is not None:
            parts.append(f"{self.bytes_per_token:.2f} bytes/token")
        return ", ".join(parts + ([self.note] if self.note else []))


def load_corpus(
    path: str,
    tokenizer: str = "byte",
    *,
    text_field: str = "text",
    val_fraction: float = 0.1,
    vocab_size: int | None = None,
    cache_dir: str | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Open the corpus at ``path``; empty means the help topics that CPython ships.

    ``path`` is a .txt, .jsonl or .parquet file, a folder of such files (read in
    order of name), a .bin shard or a folder of shards. Text is split by tokens: the
    last ``val_fraction`` validates. Shards with a meta.json know their tokenizer;
    for others ``tokenizer`` is taken unless it is "byte", and ``vocab_size`` sets
    the bound on ids. Raises InputError for anything refused.
    """
    if not 0 < val_fraction < 1:
        raise InputError(f"val_fraction is {val_fraction}; it must lie between 0 and 1")
    source = user_path(path, "data path")
    if path and not source.exists():
        raise InputError(f"data path {path!r} does not exist; give a file or folder that does")
    if not path:
        corpus = _help_topics(load_tokenizer(tokenizer), val_fraction)
    elif source.suffix == ".bin" or (source.is_dir() and any(source.glob("*.bin"))):
        corpus = _shard_corpus(source, tokenizer, val_fraction, vocab_size)
    else:
        corpus = _text_corpus(
            source, load_tokenizer(tokenizer), text_field, val_fraction, cache_dir, progress
        )
    if vocab_size is not None and vocab_size != corpus.vocab_size:
        corpus = _with_vocab(corpus, vocab_size)
    for label, stream in (("train", corpus.train), ("val", corpus.val)):
        if len(stream) < 2:
            raise InputError(
                f"data path {path!r} leaves {len(stream)} tokens for {label}, and at least 2 "
                "are needed; give more text or another val_fraction"
            )
        stream.sample_check()
    if corpus.tokenizer and corpus.val_bytes is None:
        corpus = dataclasses.replace(corpus, val_bytes=_count_bytes(corpus.val, corpus.tokenizer))
    return corpus


def _count_bytes(stream: TokenStream, tokenizer: Tokenizer) -> int | None:
    """Bytes ``stream`` stands for, scaled up from its first COUNTED tokens where it has more."""
    known = tokenizer.byte_lengths()
    if known is None:
        return None
    lengths = np.zeros(max(stream.vocab_size, len(known)), np.int64)  # padding ids are no text
    lengths[: len(known)] = known
    part = stream.view(0, min(len(stream), COUNTED))
    counted = sum(int(lengths[ids].sum()) for ids in part.blocks())
    return counted * len(stream) // len(part)


def _with_vocab(corpus: Corpus, vocab_size: int) -> Corpus:
    """The corpus for a model with more rows than its tokenizer has ids (padding)."""
    if vocab_size < corpus.vocab_size:
        raise InputError(
            f"vocab_size is {vocab_size}, below the {corpus.vocab_size} of {corpus.name}'s "
            "tokenizer; it must be at least that"
        )
    train, val = (
        TokenStream(s.segments, vocab_size, s.start, s.stop) for s in (corpus.train, corpus.val)
    )
    return dataclasses.replace(corpus, train=train, val=val, vocab_size=vocab_size)


def _split(
    name: str,
    segments: Sequence[Segment],
    tokenizer: Tokenizer,
    marks: np.ndarray,
    val_fraction: float,
) -> Corpus:
    """Cut text at a token; ``marks`` int64 [n, 2] says how many bytes lie before a token.

    Between two marks, a few KiB apart, bytes are interpolated.
    """
    whole = TokenStream(segments, tokenizer.vocab_size)
    at = len(whole) - int(len(whole) * val_fraction)
    train_bytes = round(float(np.interp(at, marks[:, 0], marks[:, 1])))
    return Corpus(
        name,
        whole.view(0, at),
        whole.view(at, len(whole)),
        tokenizer.vocab_size,
        tokenizer,
        train_bytes,
        int(marks[-1, 1]) - train_bytes,
    )


def _help_topics(tokenizer: Tokenizer, val_fraction: float) -> Corpus:
    """Real prose that needs no download: the language reference inside every CPython."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    parts: list[np.ndarray] = []
    pieces = (Piece(part, False, 0) for part in split_text([text]))
    marks = encode_to(tokenizer, pieces, parts.append)
    name = f"Python {platform.python_version()} help topics"
    return _split(name, [ArraySegment(name, np.concatenate(parts))], tokenizer, marks, val_fraction)


def _text_corpus(
    source: Path,
    tokenizer: Tokenizer,
    text_field: str,
    val_fraction: float,
    cache_dir: str | None,
    progress: Progress | None,
) -> Corpus:
    files = text_files(source)
    if isinstance(tokenizer, ByteTokenizer) and [file.suffix for file in files] == [".txt"]:
        # The file is its own shard: a byte of UTF-8 is a token.
        size = files[0].stat().st_size
        segment = FileSegment(str(files[0]), 0, "u1", size)
        marks = np.array([[0, 0], [size, size]])
    else:
        root = Path(cache_dir).expanduser() if cache_dir else default_cache()
        segment, marks = _tokenised(files, tokenizer, text_field, root, progress)
    return _split(source.name, [segment], tokenizer, marks, val_fraction)


def _shard_corpus(source: Path, spec: str, val_fraction: float, vocab_size: int | None) -> Corpus:
    """Shards as they are; a lone one is split like text."""
    shards = open_shards(source)
    tokenizer, note = _shard_tokenizer(source, spec, shards.meta)
    if shards.meta:
        vocab = int(shards.meta["vocab_size"])
    elif tokenizer:
        vocab = tokenizer.vocab_size
    elif vocab_size is not None:
        vocab = vocab_size
    else:
        vocab = max(ASSUMED_VOCAB[shard.dtype] for shard in shards.train + shards.val)
        assumed = f"vocabulary assumed from the layout of {source.name}"
        note = f"{note}; {assumed}" if note else assumed
    train = TokenStream(shards.train, vocab)
    val = TokenStream(shards.val, vocab)
    if not shards.val:
        at = len(train) - int(len(train) * val_fraction)
        train, val = train.view(0, at), train.view(at, len(train))
    counts = shards.meta.get("bytes", {})
    return Corpus(
        source.name, train, val, vocab, tokenizer, counts.get("train"), counts.get("val"), note
    )


def _shard_tokenizer(source: Path, spec: str, meta: dict[str, Any]) -> tuple[Tokenizer | None, str]:
    """The tokenizer given, else the one the shards name; and what to say if it cannot be had.

    GPT-2's comes with presets and needs a network once, so tokens train without it.
    """
    try:
        given = load_tokenizer(spec) if spec != "byte" else None
    except InputError as error:
        if spec != "gpt2":
            raise
        if not meta.get("tokenizer"):
            return None, str(error)
        given = None
    if given is not None:
        if meta and given.vocab_size != meta["vocab_size"]:
            raise InputError(
                f"tokenizer {spec!r} has {given.vocab_size} ids, but the shards in {source} were "
                f"written with {meta['tokenizer']!r} of {meta['vocab_size']}; use that one"
            )
        return given, ""
    if not meta.get("tokenizer"):
        return None, ""
    try:
        return load_tokenizer(meta["tokenizer"], source), ""
    except InputError as error:  # training on tokens needs no tokenizer
        return None, str(error)
