"""Text files as documents, documents as pieces, pieces as tokens, in bounded memory.

The end-of-text id goes before each document. Where a tokenizer has none
(``byte``) a blank line goes between documents instead, because any byte that
could serve as a separator may also stand in the text.
"""

import functools
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.tokenizer import Tokenizer, clean, require
from deeploop.utils.errors import InputError

SEPARATOR = "\n\n"  # between documents, where there is no end-of-text token
MAX_LINE = 1 << 28  # bytes of one jsonl record, which must be parsed whole


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one; ``position`` is how much of the source lies behind it."""

    text: str
    starts: bool
    position: int


def text_files(source: Path) -> list[Path]:
    """``source`` itself, or the text, jsonl and parquet files of the folder by name."""
    try:
        files = sorted(source.iterdir()) if source.is_dir() else [source]
        known = [file for file in files if file.suffix in READERS and file.is_file()]
    except OSError as error:
        raise InputError(f"data path {source} cannot be read ({error.strerror})") from error
    if not known:
        raise InputError(
            f"data path {str(source)!r} is no corpus: give {', '.join(READERS)} or .bin shards, "
            "as a file or as a folder of files"
        )
    for file in known:
        if not os.access(file, os.R_OK):
            raise InputError(f"data file {file} may not be read; change its permissions")
    return known


def read_pieces(files: Iterable[Path], field: str) -> Iterator[Piece]:
    """Every document of ``files``, in order, in bounded memory."""
    behind = 0
    for file in files:
        for chunks, position in READERS[file.suffix](file, field):
            for number, text in enumerate(split_text(chunks)):
                yield Piece(text, number == 0, behind + position())
        behind += file.stat().st_size


# A document as chunks of text, and how far into the file its reader has come.
Document = tuple[Iterable[str], Callable[[], int]]


def _read_txt(path: Path, field: str) -> Iterator[Document]:
    """The whole file is one document; line ends are kept as they are."""
    with open(path, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:

        def chunks() -> Iterator[str]:
            try:
                yield from iter(lambda: file.read(1 << 20), "")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path} is not UTF-8 ({error.reason} before byte {raw.tell()}); convert it, "
                    "or use the byte tokenizer"
                ) from error

        yield chunks(), raw.tell


def _read_jsonl(path: Path, field: str) -> Iterator[Document]:
    """One document per line: the string under ``field``; blank lines are skipped."""
    with open(path, "rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE)
            if not line:
                return
            if len(line) == MAX_LINE:
                raise InputError(f"{path} line {number} is longer than {MAX_LINE} bytes; split it")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path} line {number} is not JSON ({error}); mend it") from error
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise InputError(
                    f"{path} line {number} has no string under {field!r}, only "
                    f"{_kinds(record)}; set text_field"
                )
            yield (text,), file.tell


def _kinds(record: Any) -> str:
    """What a record is made of, in few words: its type, or its first keys and their types."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__}"
    shown = [f"{key[:40]!r} ({type(record[key]).__name__})" for key in list(record)[:8]]
    return ", ".join(shown + ["..."] * (len(record) > 8)) or "an empty object"


def _read_parquet(path: Path, field: str) -> Iterator[Document]:
    """One document per row of the column ``field``; nulls are skipped."""
    require("pyarrow", str(path), what="data path")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise InputError(
                    f"{path} has no column {field!r}, only {', '.join(columns)}; set text_field"
                )
            kind = file.schema_arrow.field(field).type
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            if plain not in (pa.string(), pa.large_string()):
                raise InputError(f"{path} column {field!r} holds {kind}, not strings")
            size, rows, done = path.stat().st_size, max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                done += len(batch)
                position = functools.partial(int, size * done // rows)
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield (text,), position
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} could not be read as parquet ({reason}); write it again"
        ) from error


READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def cut(text: str, start: int, size: int = 4096, reach: int = 1 << 16) -> int:
    """Where the piece of ``text`` that begins at ``start`` ends.

    The cut stands before a single space between two non-spaces, at ``size`` or
    later: GPT-2's pattern and its descendants part words there anyway, so the
    pieces encode to exactly the tokens of the whole. It depends on the text alone,
    never on how it was buffered, provided ``size + reach`` characters (or all that
    is left) are there to look at. Text with no such space is cut at ``size + reach``.
    """
    stop = min(len(text), start + size + reach)
    at = text.find(" ", start + size, stop - 1)
    while at >= 0:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
        at = text.find(" ", at + 1, stop - 1)
    return stop


def split_text(chunks: Iterable[str], size: int = 4096, reach: int = 1 << 16) -> Iterator[str]:
    """One document, given in chunks of any length, as pieces cut by ``cut``; O(chunk) memory."""
    held = ""
    for chunk in chunks:
        held, start = held + chunk, 0
        while len(held) - start >= size + reach:
            end = cut(held, start, size, reach)
            yield held[start:end]
            start = end
        held = held[start:]
    start = 0
    while start < len(held):
        end = cut(held, start, size, reach)
        yield held[start:end]
        start = end


def encode_pieces(
    tokenizer: Tokenizer, pieces: Iterable[Piece], batch: int = 1 << 20
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Encode pieces in order, about ``batch`` characters of text at a time.

    Yields (ids, bytes of UTF-8 they stand for, position) per piece. Before each
    document comes the end-of-text id, or between documents a blank line where the
    tokenizer has none; the blank line counts as text, the id as no bytes.
    """
    between = "" if tokenizer.eot is not None else SEPARATOR
    seen = False
    for group in _batches(pieces, batch):
        texts = []
        for piece in group:
            texts.append((between if piece.starts and seen else "") + piece.text)
            seen = True
        for piece, text, ids in zip(group, texts, tokenizer.encode_batch(texts), strict=True):
            if piece.starts and tokenizer.eot is not None:
                ids = np.concatenate([np.array([tokenizer.eot], np.uint32), ids])
            yield ids, len(clean(text).encode()), piece.position


def _batches(pieces: Iterable[Piece], size: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    held = 0
    for piece in pieces:
        group.append(piece)
        held += len(piece.text)
        if held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


def encode_to(
    tokenizer: Tokenizer,
    pieces: Iterable[Piece],
    write: Callable[[np.ndarray], Any],
    spacing: int = 4096,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """Hand the ids of every piece to ``write``.

    Returns marks, int64 [n, 2]: (tokens, bytes) so far, every ``spacing`` bytes.
    """
    tokens = size = 0
    marks = [(0, 0)]
    for ids, length, position in encode_pieces(tokenizer, pieces):
        write(ids)
        tokens, size = tokens + len(ids), size + length
        if size - marks[-1][1] >= spacing:
            marks.append((tokens, size))
            progress(position)
    return np.array([*marks, (tokens, size)], np.int64)
