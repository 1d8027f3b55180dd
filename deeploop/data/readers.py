"""Read the documents of one file: plain text, .jsonl, .csv or .parquet, also compressed.

Memory is bounded, whatever the size of a file or document. Every reader takes the path, the
field or column with the text, and the error handler for bytes that are not UTF-8.
"""

import codecs
import contextlib
import csv
import functools
import gzip
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from deeploop.data.encoded import clean, require
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief, foreign, open_regular

MAX_LINE = 1 << 28  # bytes of one line or one record, which must be parsed whole
BLOCK = 1 << 20  # bytes per read
COMPRESSED = (".gz", ".zst")

# A document as chunks of text, and a function for the reader's position in its file, in bytes.
Document = tuple[Iterable[str], Callable[[], int]]


def file_format(path: Path) -> str | None:
    """Return the ending that says how a file is read, "" for none; None if it says nothing known.

    The ending of a compressed file is that of the text in it: "a.jsonl.gz" gives ".jsonl".
    """
    compressed = path.suffix.lower() in COMPRESSED
    ending = (path.with_suffix("") if compressed else path).suffix.lower()
    known = ending in READERS and not (compressed and ending == ".parquet")
    return ending if known else None


def read_documents(path: Path, field: str, errors: str = "strict") -> Iterator[Document]:
    """Read the documents of a file.

    Args:
        path: a regular file whose format `file_format` knows.
        field: field of a .jsonl record, or column of a .csv or .parquet file.
        errors: handler for bytes of plain text and .csv that are not UTF-8: "strict" refuses
            them, "surrogateescape" keeps them.

    Raises:
        InputError: the file is damaged, or does not hold what its name says.
    """
    ending = file_format(path)
    assert ending is not None, path
    return READERS[ending](path, field, errors)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a file, decompressed, and give its position in bytes of the file on disk."""
    with open_regular(path) as raw:
        suffix = path.suffix.lower()
        if suffix == ".gz":
            yield io.BufferedReader(gzip.GzipFile(fileobj=raw), BLOCK), raw.tell
        elif suffix == ".zst":
            reader = require("zstandard", str(path), what="data path").ZstdDecompressor()
            yield io.BufferedReader(_Frames(raw, reader.decompressobj), BLOCK), raw.tell
        else:
            yield raw, raw.tell


class _Frames(io.RawIOBase):
    """The text of zstd frames in a file; raises EOFError where the last one is cut short."""

    def __init__(self, raw: IO[bytes], new_frame: Callable[[], Any]) -> None:
        self._raw, self._new_frame = raw, new_frame
        self._frame: Any = None
        self._compressed = self._text = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            block = self._compressed or self._raw.read(1024)  # which can give 32 MiB of text
            if not block and self._frame:
                raise EOFError("the compressed data is cut short")
            if not block:
                return 0
            self._frame = self._frame or self._new_frame()
            self._text, self._compressed = self._frame.decompress(block), b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size


def _reading(path: Path) -> contextlib.AbstractContextManager[None]:
    return foreign(str(path), "write or download it again", "could not be read")


def _refuse_byte(path: Path, offset: int, line: int, error: UnicodeDecodeError) -> NoReturn:
    """Refuse the byte an error is about; `offset` and `line` are those of that byte."""
    raise InputError(
        f"{path}: is not UTF-8 (byte {error.object[error.start]:#04x} at offset {offset} of the "
        f"text, in line {line}); convert it, or use the byte tokenizer"
    ) from error


def _read_text(path: Path, field: str, errors: str) -> Iterator[Document]:
    """Read the file as one document; line ends stay as they are."""
    with _opened(path) as (file, position):
        yield _decoded(file, path, errors), position


def _decoded(file: IO[bytes], path: Path, errors: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    offset, line, block = 0, 1, b"first"
    while block:
        with _reading(path):
            block = file.read(BLOCK)
        pending = decoder.getstate()[0]  # bytes of a character that the block before began
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            _refuse_byte(path, offset - len(pending) + error.start, line, error)
        offset += len(block)
        line += block.count(b"\n")


def _lines(path: Path, errors: str) -> Iterator[tuple[str, int, int]]:
    """Read lines with their ends, their numbers from 1, and the position after each in bytes."""
    with _opened(path) as (file, position):
        offset = 0
        for number in itertools.count(1):
            with _reading(path):
                line = file.readline(MAX_LINE)
            if not line:
                return
            if len(line) == MAX_LINE:
                raise InputError(f"{path} line {number} is longer than {MAX_LINE} bytes; split it")
            try:
                text = line.decode("utf-8", errors)
            except UnicodeDecodeError as error:
                _refuse_byte(path, offset + error.start, number, error)
            yield text.removeprefix("\ufeff") if number == 1 else text, number, position()
            offset += len(line)


def _read_jsonl(path: Path, field: str, errors: str) -> Iterator[Document]:
    """Read one document per line: the string under ``field``.

    Blank lines and records that are null, or null under ``field``, are skipped.
    """
    for line, number, position in _lines(path, "strict"):  # JSON is UTF-8 by definition
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number} is not JSON ({error}); fix it") from error
        if record is None or (isinstance(record, dict) and record.get(field, "") is None):
            continue
        text = record.get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise InputError(
                f"{path} line {number} has no string under {field!r}, only "
                f"{_kinds(record)}; set text_field"
            )
        yield (clean(text),), functools.partial(int, position)


def _kinds(record: Any) -> str:
    """Describe a record by its type, or by its first eight keys and their types."""
    if not isinstance(record, dict):
        return f"a {type(record).__name__}"
    shown = [f"{key[:40]!r} ({type(record[key]).__name__})" for key in list(record)[:8]]
    return ", ".join(shown + ["..."] * (len(record) > 8)) or "an empty object"


def _read_csv(path: Path, field: str, errors: str) -> Iterator[Document]:
    """Read one document per row under the line of column names; empty ones are skipped."""
    position = 0

    def lines() -> Iterator[str]:
        nonlocal position
        for text, _, position in _lines(path, errors):  # noqa: B007
            yield text

    rows = csv.reader(lines(), strict=True)
    limit = csv.field_size_limit(MAX_LINE)
    try:
        header = next(rows, [])
        column = header.index(_csv_column(path, header, field))
        for row in rows:
            if row and len(row) != len(header):
                raise InputError(
                    f"{path} line {rows.line_num} has {len(row)} columns, not the {len(header)} of "
                    "its first line; fix it"
                )
            if row and row[column]:
                yield (row[column],), functools.partial(int, position)
    except csv.Error as error:
        raise InputError(f"{path} line {rows.line_num} is not CSV ({error}); fix it") from error
    finally:
        csv.field_size_limit(limit)


def _csv_column(path: Path, header: list[str], field: str) -> str:
    """Return the name of the column with the text: ``field``, or the only one."""
    if field in header:
        return field
    if len(header) == 1:
        return header[0]
    shown = brief(", ".join(header)) or "none"
    raise InputError(f"{path} has no column {field!r}, only {shown}; set text_field")


def text_column(path: Path, field: str) -> str:
    """Return the name of the column of a .csv file that is read."""
    header = next(csv.reader([next((text for text, _, _ in _lines(path, "replace")), "")]), [])
    return _csv_column(path, header, field)


def _read_parquet(path: Path, field: str, errors: str) -> Iterator[Document]:
    """Read one document per row of the column ``field``; nulls are skipped."""
    require("pyarrow", str(path), what="data path")
    import pyarrow.parquet as pq

    with open_regular(path) as raw:
        reading = functools.partial(foreign, str(path), "write it again", "is not parquet")
        with reading():
            file = pq.ParquetFile(raw)
            _check_column(path, file.schema_arrow, field)
            size, rows, done = path.stat().st_size, max(1, file.metadata.num_rows), 0
            batches = file.iter_batches(batch_size=256, columns=[field])
        while True:
            with reading():
                batch = next(batches, None)
                texts = batch.column(0).to_pylist() if batch is not None else []
            if batch is None:
                return
            done += len(batch)
            for text in texts:
                if text is not None:
                    yield (text,), functools.partial(int, size * done // rows)


def _check_column(path: Path, schema: Any, field: str) -> None:
    import pyarrow as pa

    if field not in schema.names:
        shown = brief(", ".join(schema.names))
        raise InputError(f"{path} has no column {field!r}, only {shown}; set text_field")
    kind = schema.field(field).type
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    if plain not in (pa.string(), pa.large_string()):
        raise InputError(f"{path} column {field!r} has type {kind}, not string; set text_field")


READERS: dict[str, Callable[[Path, str, str], Iterator[Document]]] = {
    ".txt": _read_text,
    "": _read_text,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
