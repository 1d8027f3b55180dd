"""Read text files as documents, split documents into spans, and encode spans as tokens.

Memory is bounded, whatever the size of a file or document.

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
class TextSpan:
    """Consecutive text of one document, short enough to encode at once."""

    text: str
    starts_document: bool
    position: int  # bytes of the source read so far, for a progress report


def text_files(source: Path) -> list[Path]:
    """List ``source`` itself, or the .txt, .jsonl and .parquet files of the folder by name."""
    try:
        files = sorted(source.iterdir()) if source.is_dir() else [source]
        known = [file for file in files if file.suffix in READERS and file.is_file()]
    except OSError as error:
        raise InputError(f"data path {source} cannot be read ({error.strerror})") from error
    if not known:
        raise InputError(
            f"data path {str(source)!r} is not a corpus: give {', '.join(READERS)} or .bin shards, "
            "as a file or as a folder of files"
        )
    for file in known:
        if not os.access(file, os.R_OK):
            raise InputError(f"data file {file} may not be read; change its permissions")
    return known


def read_spans(files: Iterable[Path], field: str) -> Iterator[TextSpan]:
    """Read every document of ``files`` in order, as spans."""
    size_before = 0
    for file in files:
        for chunks, position in READERS[file.suffix](file, field):
            for number, text in enumerate(split_text(chunks)):
                yield TextSpan(text, number == 0, size_before + position())
        size_before += file.stat().st_size


# A document as chunks of text, and a function for the reader's position in its file, in bytes.
Document = tuple[Iterable[str], Callable[[], int]]


def _read_txt(path: Path, field: str) -> Iterator[Document]:
    """Read the file as one document; line ends stay as they are."""
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
    """Read one document per line: the string under ``field``; blank lines are skipped."""
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
                raise InputError(f"{path} line {number} is not JSON ({error}); fix it") from error
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise InputError(
                    f"{path} line {number} has no string under {field!r}, only "
                    f"{_kinds(record)}; set text_field"
                )
            yield (text,), file.tell


def _kinds(record: Any) -> str:
    """Describe a record by its type, or by its first eight keys and their types."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__}"
    shown = [f"{key[:40]!r} ({type(record[key]).__name__})" for key in list(record)[:8]]
    return ", ".join(shown + ["..."] * (len(record) > 8)) or "an empty object"


def _read_parquet(path: Path, field: str) -> Iterator[Document]:
    """Read one document per row of the column ``field``; nulls are skipped."""
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
                raise InputError(f"{path} column {field!r} has type {kind}, not string")
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


def span_end(text: str, start: int, size: int = 4096, reach: int = 1 << 16) -> int:
    """Return the end of the span of ``text`` that begins at ``start``.

    It is the first single space between two non-spaces that is ``size`` characters or
    more after ``start``. GPT-2's pattern and those derived from it split words there, so
    that the spans encode to exactly the tokens of the complete text. Without such a space
    the span ends after ``size + reach`` characters. The end depends on the text alone, not
    on how it was buffered, if ``text`` has ``size + reach`` characters from ``start`` on or
    the document ends with it.
    """
    stop = min(len(text), start + size + reach)
    space = text.find(" ", start + size, stop - 1)
    while space >= 0:
        if not text[space - 1].isspace() and not text[space + 1].isspace():
            return space
        space = text.find(" ", space + 1, stop - 1)
    return stop


def split_text(chunks: Iterable[str], size: int = 4096, reach: int = 1 << 16) -> Iterator[str]:
    """Split one document, given in chunks of any length, at `span_end`; O(chunk) memory."""
    buffer = ""
    for chunk in chunks:
        buffer, start = buffer + chunk, 0
        while len(buffer) - start >= size + reach:
            end = span_end(buffer, start, size, reach)
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    start = 0
    while start < len(buffer):
        end = span_end(buffer, start, size, reach)
        yield buffer[start:end]
        start = end


def encode_spans(
    tokenizer: Tokenizer, spans: Iterable[TextSpan], batch: int = 1 << 20
) -> Iterator[tuple[np.ndarray, int, int]]:
    """Encode spans in order, about ``batch`` characters of text at a time.

    Yields (ids, bytes of UTF-8 they decode to, position) per span. Before each document
    comes the end-of-text id, which counts as 0 bytes. Where the tokenizer has none, a
    blank line, which counts as text, comes between documents.
    """
    between = "" if tokenizer.eot is not None else SEPARATOR
    first = True
    for group in _batches(spans, batch):
        texts = []
        for span in group:
            texts.append((between if span.starts_document and not first else "") + span.text)
            first = False
        for span, text, ids in zip(group, texts, tokenizer.encode_batch(texts), strict=True):
            if span.starts_document and tokenizer.eot is not None:
                ids = np.concatenate([np.array([tokenizer.eot], np.uint32), ids])
            yield ids, len(clean(text).encode()), span.position


def _batches(spans: Iterable[TextSpan], size: int) -> Iterator[list[TextSpan]]:
    """Group consecutive spans until each group has ``size`` characters."""
    group: list[TextSpan] = []
    characters = 0
    for span in spans:
        group.append(span)
        characters += len(span.text)
        if characters >= size:
            yield group
            group, characters = [], 0
    if group:
        yield group


def encode_to(
    tokenizer: Tokenizer,
    spans: Iterable[TextSpan],
    write: Callable[[np.ndarray], Any],
    spacing: int = 4096,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    """Encode spans in order and pass the ids of each to ``write``.

    Returns marks, int64 [n, 2]: (tokens, bytes) from the start on, every ``spacing`` bytes.
    """
    tokens = size = 0
    marks = [(0, 0)]
    for ids, length, position in encode_spans(tokenizer, spans):
        write(ids)
        tokens, size = tokens + len(ids), size + length
        if size - marks[-1][1] >= spacing:
            marks.append((tokens, size))
            progress(position)
    return np.array([*marks, (tokens, size)], np.int64)
