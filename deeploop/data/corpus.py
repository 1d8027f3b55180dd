"""Open a file or folder as a corpus: two streams of tokens, ``train`` and ``val``.

A .txt file for the byte tokenizer and token shards are read in place; any other text is
tokenised once into a cache folder. No more than a block is in memory at a time, so a
corpus may be larger than the memory. `deeploop.data.batches` reads batches from the
streams.
"""

import dataclasses
import math
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data import checksums
from deeploop.data.batches import train_batch, val_batches, windows_per_epoch
from deeploop.data.folders import text_files
from deeploop.data.ngrams import ngram_bits
from deeploop.data.readers import file_format, text_column
from deeploop.data.shard_tokenizer import shard_tokenizer
from deeploop.data.shards import ShardSet, check_hashes, open_shards
from deeploop.data.source import Pair, Source
from deeploop.data.stream import ArraySegment, FileSegment, Segment, TokenStream
from deeploop.data.text import TextSpan, encode_to, split_text
from deeploop.data.token_cache import Progress, default_cache, tokenise_to_cache
from deeploop.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError

ASSUMED_VOCAB = {"<u2": 50257, "<u4": 128256}  # GPT-2 and Llama 3, which these layouts are for
COUNTED = 1 << 24  # tokens of val whose bytes are counted where meta.json has no count


@dataclass(frozen=True)
class Corpus(Source):
    """Training and validation tokens, their tokenizer and their size as text.

    ``tokenizer`` is None for shards that name none. ``train_bytes`` and ``val_bytes``
    are the UTF-8 bytes of text that the tokens stand for, None where unknown. End-of-text
    tokens and unknown tokens count as 0 bytes, so that predicting them adds to the bits per
    byte. For shards without a byte count, ``val_bytes`` is scaled up from the first COUNTED
    tokens. ``dropped_bytes`` of the text are in no token. ``note`` is a remark for the log:
    files that are not read, text that is dropped, a tokenizer that could not be loaded.
    ``val`` is empty where the caller asked for a val_fraction of 0.
    """

    name: str
    train: TokenStream
    val: TokenStream
    vocab_size: int
    tokenizer: Tokenizer | None = None
    train_bytes: int | None = None
    val_bytes: int | None = None
    dropped_bytes: int | None = None
    note: str = ""

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes per token of val: bits per byte are loss / ln 2 / bytes_per_token."""
        return self.val_bytes / len(self.val) if self.val_bytes and len(self.val) else None

    def first_bytes_per_token(self, tokens: int) -> float | None:
        """Return the UTF-8 bytes per token of the first `tokens` tokens of val.

        Those of all of val where the bytes of a token depend on the ids around it.
        """
        mean = self.bytes_per_token
        if mean is None or self.tokenizer is None or tokens >= len(self.val):
            return mean
        first = _count_bytes(self.val.view(0, tokens), self.tokenizer)
        every = _count_bytes(self.val, self.tokenizer)
        # Scaled, because a tokenizer that changes the text has other bytes in its tokens.
        return mean * first / every * len(self.val) / tokens if first and every else mean

    def batch(
        self, *, seed: int, step: int, global_batch: int, seq_len: int, rows: slice | range
    ) -> Pair:
        return train_batch(
            self.train, seed=seed, step=step, global_batch=global_batch, seq_len=seq_len, rows=rows
        )

    @property
    def held_out_targets(self) -> int:
        return len(self.val) - 1

    def held_out(self, batch: int, seq_len: int, targets: int) -> Iterator[Pair]:
        return val_batches(self.val, batch=batch, seq_len=seq_len, targets=targets)

    def held_out_sequences(self, seq_len: int) -> int:
        return windows_per_epoch(len(self.val), seq_len) if len(self.val) > seq_len else 0

    def draw_held_out(self, seed: int, count: int, seq_len: int) -> Pair:
        return train_batch(
            self.val, seed=seed, step=0, global_batch=count, seq_len=seq_len, rows=range(count)
        )

    def identity(self) -> dict[str, Any]:
        """Return token counts, fingerprints and hashes.

        Fingerprints are of samples, hashes of every token of a stream that is not very long.
        """
        return {
            "train_tokens": len(self.train),
            "val_tokens": len(self.val),
            "fingerprint": [self.train.fingerprint(), self.val.fingerprint()],
            "content": [self.train.content(), self.val.content()],
        }

    def floors(self) -> dict[str, float]:
        """Return the loss that unigram and bigram counts reach, in nats per held-out token."""
        unigram, bigram = ngram_bits(self.train, self.val, self.vocab_size)
        floors = {"unigram": unigram * math.log(2)}
        return floors if bigram is None else floors | {"bigram": bigram * math.log(2)}

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
    tokenizer: str = "auto",
    *,
    text_field: str = "text",
    val_fraction: float = 0.1,
    vocab_size: int | None = None,
    cache_dir: str | None = None,
    progress: Progress | None = None,
    verify: bool = False,
) -> Corpus:
    """Open the corpus at ``path``.

    Args:
        path: a .txt, .jsonl, .csv or .parquet file, also as .gz or .zst, a file without an
            ending, a folder of such files (read in order of name), a .bin shard or a folder
            of shards. Empty: the help topics in CPython.
        tokenizer: see `deeploop.data.tokenizer`.
        text_field: field of a .jsonl record, or column of a .csv or .parquet file, with the
            text.
        val_fraction: the last tokens that validate, where no file is called val; 0: none.
        vocab_size: ids of the model, at least those of the tokenizer; None takes those.
        cache_dir: folder for tokenised text; None takes `default_cache()`.
        progress: called as (phase, done, total) while text is tokenised.
        verify: compare the checksums of cached tokens and of shards, whatever their size.

    Raises:
        InputError: a path, tokenizer, shard or number is refused.
    """
    if not 0 <= val_fraction < 1:
        raise InputError(f"val_fraction is {val_fraction}; it must be at least 0 and less than 1")
    source = user_path(path, "data path")
    if path and not source.exists():
        raise InputError(
            f"data path {path!r} does not exist; give the place of the data now with --data"
        )
    if not path:
        corpus = _help_topics(load_tokenizer(tokenizer), val_fraction)
    elif is_shards(source):
        corpus = _shard_corpus(source, tokenizer, val_fraction, vocab_size, verify)
    else:
        root = Path(cache_dir).expanduser() if cache_dir else default_cache()
        reader = _TextReader(load_tokenizer(tokenizer), text_field, root, progress, verify)
        corpus = _text_corpus(source, reader, val_fraction)
    if vocab_size is not None and vocab_size != corpus.vocab_size:
        corpus = _with_vocab(corpus, vocab_size)
    for label, stream in (("train", corpus.train), ("val", corpus.val)):
        if len(stream) < 2 and (label == "train" or val_fraction):
            raise InputError(
                f"data path {path!r} leaves {len(stream)} tokens for {label}, and at least 2 "
                "are needed; give more text or another val_fraction"
            )
        stream.sample_check()
    if corpus.tokenizer and corpus.val_bytes is None and len(corpus.val):
        corpus = dataclasses.replace(corpus, val_bytes=_count_bytes(corpus.val, corpus.tokenizer))
    return corpus


def is_shards(source: Path) -> bool:
    """Return True for a .bin file, or a folder with one in it."""
    return source.suffix == ".bin" or (source.is_dir() and any(source.glob("*.bin")))


def _notes(*notes: str) -> str:
    return "; ".join(filter(None, notes))


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


def _split(name: str, text: "_Text", tokenizer: Tokenizer, val_fraction: float) -> Corpus:
    """Split text into train and val at a token; bytes are interpolated between its marks."""
    stream = TokenStream([text.segment], tokenizer.vocab_size)
    train_tokens = len(stream) - int(len(stream) * val_fraction)
    marks = text.marks
    train_bytes = round(float(np.interp(train_tokens, marks[:, 0], marks[:, 1])))
    return Corpus(
        name,
        stream.view(0, train_tokens),
        stream.view(train_tokens, len(stream)),
        tokenizer.vocab_size,
        tokenizer,
        train_bytes,
        text.bytes - train_bytes,
        text.text_bytes - text.bytes,
    )


def _help_topics(tokenizer: Tokenizer, val_fraction: float) -> Corpus:
    """Tokenise the help topics in every CPython: English prose that needs no download."""
    from pydoc_data.topics import topics

    content = "\n".join(topics[key] for key in sorted(topics))
    ids: list[np.ndarray] = []
    spans = (TextSpan(span, False, 0) for span in split_text([content], tokenizer.cuts))
    marks, text_bytes = encode_to(tokenizer, spans, ids.append)
    name = f"Python {platform.python_version()} help topics"
    text = _Text(ArraySegment(name, np.concatenate(ids)), marks, text_bytes)
    return _with_dropped(_split(name, text, tokenizer, val_fraction))


@dataclass(frozen=True)
class _Text:
    """Tokens of text; marks, int64 [n, 2]: (tokens, bytes they stand for); bytes of all text."""

    segment: Segment
    marks: np.ndarray
    text_bytes: int

    @property
    def bytes(self) -> int:
        return int(self.marks[-1, 1])


@dataclass(frozen=True)
class _TextReader:
    """Turn text files into tokens, by the cache or in place."""

    tokenizer: Tokenizer
    field: str
    cache: Path
    progress: Progress | None
    verify: bool

    def read(self, files: Sequence[Path]) -> _Text:
        """Tokenise files, or read the bytes of a single plain text file in place."""
        in_place = len(files) == 1 and files[0].suffix.lower() in ("", ".txt")
        if isinstance(self.tokenizer, ByteTokenizer) and in_place:
            size = files[0].stat().st_size
            segment = FileSegment(str(files[0]), 0, "u1", size)
            segment.remember(whole=size <= checksums.SMALL)
            return _Text(segment, np.array([[0, 0], [size, size]]), size)
        cached = tokenise_to_cache(
            files, self.tokenizer, self.field, self.cache, self.progress, self.verify
        )
        return _Text(cached.segment, cached.marks, cached.text_bytes)

    def columns(self, files: Sequence[Path]) -> str:
        """Say which column is read of .csv files."""
        names = sorted({text_column(f, self.field) for f in files if file_format(f) == ".csv"})
        return f"text column {', '.join(map(repr, names))}" if names else ""


def _text_corpus(source: Path, reader: _TextReader, val_fraction: float) -> Corpus:
    """Open a text file, or a folder of them with the split its names say."""
    files, tokenizer = text_files(source), reader.tokenizer
    text = reader.read(files.train)
    if files.val:
        val = reader.read(files.val)
        corpus = Corpus(
            source.name,
            TokenStream([text.segment], tokenizer.vocab_size),
            TokenStream([val.segment], tokenizer.vocab_size),
            tokenizer.vocab_size,
            tokenizer,
            text.bytes,
            val.bytes,
            text.text_bytes + val.text_bytes - text.bytes - val.bytes,
        )
    else:
        corpus = _split(source.name, text, tokenizer, val_fraction)
    note = _notes(
        files.remark() if source.is_dir() else "", reader.columns([*files.train, *files.val])
    )
    return _with_dropped(dataclasses.replace(corpus, note=note))


def _with_dropped(corpus: Corpus) -> Corpus:
    """Add a note on text that is in no token."""
    dropped, name = corpus.dropped_bytes, corpus.tokenizer and corpus.tokenizer.name
    if not dropped:
        return corpus
    rest = (corpus.train_bytes or 0) + (corpus.val_bytes or 0)
    share = 100 * dropped / (dropped + rest)
    note = (
        f"tokenizer {name} drops {share:.2g}% of the text's bytes or has no token for them; they "
        "do not count in bits/byte"
    )
    return dataclasses.replace(corpus, note=_notes(corpus.note, note))


def _shard_corpus(
    source: Path, spec: str, val_fraction: float, vocab_size: int | None, verify: bool
) -> Corpus:
    """Open shards in place; without one held out, they are split into train and val like text."""
    shards = open_shards(source)
    checked = _check_shards(shards, verify)
    tokenizer, note = shard_tokenizer(source, spec, shards.meta)
    if shards.meta:
        vocab = int(shards.meta["vocab_size"])
    elif tokenizer:
        vocab = tokenizer.vocab_size
    elif vocab_size is not None:
        vocab = vocab_size
    else:
        vocab = max(ASSUMED_VOCAB[shard.dtype] for shard in shards.train + shards.val)
        note = _notes(note, f"vocabulary assumed from the layout of {source.name}")
    train = TokenStream(shards.train, vocab)
    val = TokenStream(shards.val, vocab)
    if not shards.val:
        cut = len(train) - int(len(train) * val_fraction)
        train, val = train.view(0, cut), train.view(cut, len(train))
    counts = shards.meta.get("bytes", {}) if shards.val else {}
    corpus = Corpus(
        source.name,
        train,
        val,
        vocab,
        tokenizer,
        counts.get("train"),
        counts.get("val"),
        shards.meta.get("dropped_bytes"),
        _notes(note, shards.remark, checked),
    )
    return _with_dropped(corpus)


def _check_shards(shards: ShardSet, verify: bool) -> str:
    """Compare shards with their checksums, if they are small or on request; returns a note."""
    segments = shards.train + shards.val
    size = sum(segment.count * np.dtype(segment.dtype).itemsize for segment in segments)
    whole = verify or size <= checksums.SMALL
    digests = {segment.label: segment.remember(whole) for segment in segments}
    compared = check_hashes(shards, digests) if whole else 0
    return f"checksums of {compared} of {len(segments)} shards match" if verify else ""
