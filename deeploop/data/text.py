"""Split documents into spans, and encode spans as the tokens of the complete documents.

Memory is bounded, whatever the size of a file or document.

The end-of-text id goes before each document. Where a tokenizer has none
(``byte``) a blank line goes between documents instead, because any byte that
could serve as a separator may also stand in the text.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deeploop.data.readers import read_documents
from deeploop.data.tokenizer import ByteTokenizer, Tokenizer, clean
from deeploop.utils.errors import InputError

SEPARATOR = "\n\n"  # between documents, where there is no end-of-text token
SPAN = 4096  # characters of a span, at least
MAX_SPAN = 1 << 24  # characters that are encoded at once, at most


@dataclass(frozen=True)
class TextSpan:
    """Consecutive text of one document, short enough to encode at once."""

    text: str
    starts_document: bool
    position: int  # bytes of the source read so far, for a progress report


def read_spans(files: Iterable[Path], field: str, tokenizer: Tokenizer) -> Iterator[TextSpan]:
    """Read every document of ``files`` in order, as spans that can be encoded one by one."""
    size_before = 0
    errors = "surrogateescape" if isinstance(tokenizer, ByteTokenizer) else "strict"
    for file in files:
        for chunks, position in read_documents(file, field, errors):
            spans = split_text(chunks, tokenizer.cuts, source=str(file))
            for number, text in enumerate(spans):
                yield TextSpan(text, number == 0, size_before + position())
        size_before += file.stat().st_size


def split_text(
    chunks: Iterable[str],
    cuts: re.Pattern[str] | None,
    *,
    size: int = SPAN,
    most: int = MAX_SPAN,
    source: str = "the text",
) -> Iterator[str]:
    """Split one document, given in chunks of any length, at the first safe place of each span.

    Args:
        chunks: the document.
        cuts: matches where a text may be cut (`deeploop.data.cuts`); None: nowhere.
        size: characters of a span, at least, but for the last.
        most: characters in memory at a time.
        source: name of the document in an error.

    Raises:
        InputError: more than `most` characters have no safe place among them.

    The spans depend on the text alone, not on how it is divided into chunks.
    """
    buffer = ""
    for chunk in chunks:
        searched = max(size, len(buffer) - 2)  # a place is told by 2 characters after it
        buffer, start = buffer + chunk, 0
        while cuts and (place := cuts.search(buffer, max(searched, start + size))):
            yield buffer[start : place.start()]
            start = place.start()
        buffer = buffer[start:]
        if len(buffer) > most:
            raise InputError(
                f"{source}: has a document with {most:,} characters that this tokenizer encodes "
                "only as a whole; divide it into shorter documents, or use byte or gpt2"
            )
    if buffer:
        yield buffer


class EncodedSpan(NamedTuple):
    """Token ids of a span, the bytes of text they stand for, and the bytes of all its text."""

    ids: np.ndarray
    bytes: int
    text_bytes: int
    position: int


def encode_spans(
    tokenizer: Tokenizer, spans: Iterable[TextSpan], batch: int = 1 << 20
) -> Iterator[EncodedSpan]:
    """Encode spans in order, about ``batch`` characters of text at a time.

    Before each document comes the end-of-text id, which counts as 0 bytes. Where the
    tokenizer has none, a blank line, which counts as text, comes between documents.
    """
    between = "" if tokenizer.eot is not None else SEPARATOR
    first = True
    for group in _batches(spans, batch):
        texts = []
        for span in group:
            texts.append((between if span.starts_document and not first else "") + span.text)
            first = False
        for span, text, encoded in zip(group, texts, tokenizer.encode_batch(texts), strict=True):
            ids, size = encoded
            if span.starts_document and tokenizer.eot is not None:
                ids = np.concatenate([np.array([tokenizer.eot], np.uint32), ids])
            yield EncodedSpan(ids, size, _utf8_bytes(text), span.position)


def _utf8_bytes(text: str) -> int:
    try:
        return len(text.encode(errors="surrogateescape"))
    except UnicodeEncodeError:
        return len(clean(text).encode())


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
) -> tuple[np.ndarray, int]:
    """Encode spans in order and pass the ids of each to ``write``.

    Returns marks, int64 [n, 2]: (tokens, bytes they stand for) from the start on, every
    ``spacing`` bytes; and the bytes of all text, in UTF-8.
    """
    tokens = size = text_size = 0
    marks = [(0, 0)]
    for span in encode_spans(tokenizer, spans):
        write(span.ids)
        tokens, size = tokens + len(span.ids), size + span.bytes
        text_size += span.text_bytes
        if size - marks[-1][1] >= spacing:
            marks.append((tokens, size))
            progress(span.position)
    return np.array([*marks, (tokens, size)], np.int64), text_size
