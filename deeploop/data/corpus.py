"""Open a file or folder as a corpus: two streams of tokens, ``train`` and ``val``.

A .txt file for the byte tokenizer and token shards are read in place; any other text is
tokenised once into a cache folder. No more than a block is in memory at a time, so a
corpus may be larger than the memory. `deeploop.data.batches` reads batches from the
streams.
"""

import dataclasses
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.shards import open_shards
from deeploop.data.stream import ArraySegment, FileSegment, Segment, TokenStream
from deeploop.data.text import TextSpan, encode_to, split_text, text_files
from deeploop.data.token_cache import Progress, default_cache, tokenise_to_cache
from deeploop.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError

ASSUMED_VOCAB = {"<u2": 50257, "<u4": 128256}  # GPT-2 and Llama 3, which these layouts are for
COUNTED = 1 << 24  # tokens of val whose bytes are counted where meta.json has no count


@dataclass(frozen=True)
class Corpus:
    """Training and validation tokens, their tokenizer and their size as text.

    ``tokenizer`` is None for shards that name none. ``train_bytes`` and ``val_bytes``
    are the UTF-8 bytes that the tokens decode to, None where unknown. End-of-text tokens
    count as 0 bytes, so that predicting them adds to the bits per byte. For shards without
    a byte count, ``val_bytes`` is scaled up from the first COUNTED tokens. ``note`` is a
    remark for the log, such as a tokenizer that could not be loaded.
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
        """UTF-8 bytes per token of val: bits per byte are loss / ln 2 / bytes_per_token."""
        return self.val_bytes / len(self.val) if self.val_bytes and len(self.val) else None

    def describe(self) -> str:
        """Return one line for the start of a log: name, tokens, tokenizer, vocabulary."""
        facts = [
            f"{self.name}: {len(self.train):,} train and {len(self.val):,} val tokens",
            f"tokenizer {self.tokenizer.name if self.tokenizer else 'none'}",
            f"vocabulary {self.vocab_size:,}",
        ]
        if self.bytes_per_token is not None:
            facts.append(f"{self.bytes_per_token:.2f} bytes/token")
        return ", ".join(facts + ([self.note] if self.note else []))


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
    """Open the corpus at ``path``.

    Args:
        path: a .txt, .jsonl or .parquet file, a folder of such files (read in order of
            name), a .bin shard or a folder of shards. Empty: the help topics in CPython.
        tokenizer: see `deeploop.data.tokenizer`. Shards with a meta.json have their own;
            for other shards "byte" means unknown.
        text_field: field of a .jsonl record, or column of a .parquet file, with the text.
        val_fraction: the last tokens of text, or of a single shard, that validate.
        vocab_size: ids of the model, at least those of the tokenizer; None takes those.
        cache_dir: folder for tokenised text; None takes `default_cache()`.
        progress: called as (phase, done, total) while text is tokenised.

    Raises:
        InputError: a path, tokenizer, shard or number is refused.
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
    """Count the UTF-8 bytes of ``stream``, scaled up from its first COUNTED tokens if longer."""
    by_id = tokenizer.byte_lengths()
    if by_id is None:
        return None
    lengths = np.zeros(max(stream.vocab_size, len(by_id)), np.int64)  # padding ids: 0 bytes
    lengths[: len(by_id)] = by_id
    start = stream.view(0, min(len(stream), COUNTED))
    counted = sum(int(lengths[ids].sum()) for ids in start.blocks())
    return counted * len(stream) // len(start)


def _with_vocab(corpus: Corpus, vocab_size: int) -> Corpus:
    """Allow ids up to ``vocab_size``, for a model with more embedding rows than the tokenizer."""
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
    """Split text into train and val at a token.

    marks: int64 [n, 2], (token, bytes before it) every few KiB; interpolated in between.
    """
    stream = TokenStream(segments, tokenizer.vocab_size)
    train_tokens = len(stream) - int(len(stream) * val_fraction)
    train_bytes = round(float(np.interp(train_tokens, marks[:, 0], marks[:, 1])))
    return Corpus(
        name,
        stream.view(0, train_tokens),
        stream.view(train_tokens, len(stream)),
        tokenizer.vocab_size,
        tokenizer,
        train_bytes,
        int(marks[-1, 1]) - train_bytes,
    )


def _help_topics(tokenizer: Tokenizer, val_fraction: float) -> Corpus:
    """Tokenise the help topics in every CPython: English prose that needs no download."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))
    ids: list[np.ndarray] = []
    spans = (TextSpan(span, False, 0) for span in split_text([text]))
    marks = encode_to(tokenizer, spans, ids.append)
    name = f"Python {platform.python_version()} help topics"
    return _split(name, [ArraySegment(name, np.concatenate(ids))], tokenizer, marks, val_fraction)


def _text_corpus(
    source: Path,
    tokenizer: Tokenizer,
    text_field: str,
    val_fraction: float,
    cache_dir: str | None,
    progress: Progress | None,
) -> Corpus:
    """Tokenise a text file or a folder of them, or read a .txt file's bytes in place."""
    files = text_files(source)
    if isinstance(tokenizer, ByteTokenizer) and [file.suffix for file in files] == [".txt"]:
        # Read in place: each byte of the file is a token.
        size = files[0].stat().st_size
        segment = FileSegment(str(files[0]), 0, "u1", size)
        marks = np.array([[0, 0], [size, size]])
    else:
        root = Path(cache_dir).expanduser() if cache_dir else default_cache()
        segment, marks = tokenise_to_cache(files, tokenizer, text_field, root, progress)
    return _split(source.name, [segment], tokenizer, marks, val_fraction)


def _shard_corpus(source: Path, spec: str, val_fraction: float, vocab_size: int | None) -> Corpus:
    """Open shards in place; a single one is split into train and val like text."""
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
        cut = len(train) - int(len(train) * val_fraction)
        train, val = train.view(0, cut), train.view(cut, len(train))
    counts = shards.meta.get("bytes", {})
    return Corpus(
        source.name, train, val, vocab, tokenizer, counts.get("train"), counts.get("val"), note
    )


def _shard_tokenizer(source: Path, spec: str, meta: dict[str, Any]) -> tuple[Tokenizer | None, str]:
    """Load the tokenizer of ``spec``, else the one the shards name; and a note if that fails.

    Presets name GPT-2's, which needs a network once: without one, shards still train.
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
