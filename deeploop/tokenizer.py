"""Text to tokens and back: tokenizers, and the streaming encoder of whole corpora.

===================  =====================================================  ============
spec                 what it is                                             needs
===================  =====================================================  ============
``byte``             UTF-8 bytes: vocabulary 256, no end-of-text token      nothing
``gpt2``             GPT-2's BPE, fetched once and cached by tiktoken       tiktoken
``gpt2:DIR``         the same from DIR's vocab.json and merges.txt          tokenizers
``gpt2:VOCAB,MERGES``  the same from two named files                        tokenizers
``PATH.json``        any Hugging Face tokenizers file (or its folder)       tokenizers
===================  =====================================================  ============

Special tokens are never read out of text: a document that quotes
``<|endoftext|>`` is encoded as those characters. The end-of-text id is put in
before each document by ``encode_documents``; a tokenizer that has none (``byte``)
gets a blank line between documents instead, because any byte that could serve as
a separator may also stand in the text.
"""

import functools
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deeploop.errors import InputError

GPT2_EOT = "<|endoftext|>"
EOT_NAMES = (GPT2_EOT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
SEPARATOR = "\n\n"  # between documents, where there is no end-of-text token
MAX_LINE = 1 << 28  # bytes of one jsonl record, which must be parsed whole
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
KINDS = "byte, gpt2, gpt2:DIR, gpt2:VOCAB,MERGES or a path to a tokenizer.json"


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer.

    ``decode`` never raises: broken UTF-8 and ids past the vocabulary (a padded
    output layer can sample them) become U+FFFD. ``fingerprint`` differs whenever
    two tokenizers could encode the same text differently.
    """

    name: str
    spec: str
    vocab_size: int
    eot: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def save(self, folder: Path) -> str:
        """Put what is needed to reload it into ``folder``; returns the spec from there."""
        ...


def clean(text: str) -> str:
    """``text`` with lone surrogates (JSON can carry them) replaced, so UTF-8 can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class ByteTokenizer:
    """Each UTF-8 byte is a token."""

    name = spec = fingerprint = "byte"
    vocab_size = 256
    eot: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(clean(text).encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(clean(text).encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        # 0xFF occurs nowhere in UTF-8, so an id that is no byte decodes to U+FFFD.
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode(errors="replace")

    def save(self, folder: Path) -> str:
        return self.spec


class GPT2Tokenizer:
    """GPT-2's BPE by tiktoken: 50257 tokens, the last of them the end of text."""

    name = spec = fingerprint = "gpt2"

    def __init__(self) -> None:
        tiktoken = _require("tiktoken", "gpt2")
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever the network stack raises
            raise InputError(
                f"tokenizer 'gpt2' could not be fetched ({type(error).__name__}); connect once, or "
                "give local files as gpt2:DIR, a folder with vocab.json and merges.txt"
            ) from error
        self.vocab_size: int = self._bpe.n_vocab
        self.eot: int | None = self._bpe.eot_token

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode_ordinary(clean(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        rows = self._bpe.encode_ordinary_batch([clean(text) for text in texts])
        return [np.asarray(row, np.uint32) for row in rows]

    def decode(self, ids: Iterable[int]) -> str:
        known = (i if 0 <= i < self.vocab_size else None for i in ids)
        return b"".join(
            b"\xff" if i is None else self._bpe.decode_single_token_bytes(i) for i in known
        ).decode(errors="replace")

    def save(self, folder: Path) -> str:
        return self.spec


class FileTokenizer:
    """A ``tokenizers.Tokenizer`` read from local files."""

    def __init__(self, inner: Any, spec: str, name: str) -> None:
        # Text is data: "<|endoftext|>" inside a document must not become the token.
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.name, self.spec = name, spec
        # The highest id decides, not the number of entries: ids may have holes.
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not self.vocab_size:
            raise InputError(f"tokenizer {spec!r} has an empty vocabulary; give another file")
        found = (inner.token_to_id(name) for name in EOT_NAMES)
        self.eot: int | None = next((i for i in found if i is not None), None)
        self.fingerprint = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(clean(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # The fast form, where there is one, leaves out the offsets.
        encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        rows = encode([clean(text) for text in texts], add_special_tokens=False)
        return [np.asarray(row.ids, np.uint32) for row in rows]

    def decode(self, ids: Iterable[int]) -> str:
        known = itertools.groupby(map(int, ids), lambda i: 0 <= i < self.vocab_size)
        return "".join(
            self._inner.decode(list(run), skip_special_tokens=False)
            if inside
            else REPLACEMENT * len(list(run))
            for inside, run in known
        )

    def save(self, folder: Path) -> str:
        self._inner.save(str(folder / "tokenizer.json"))
        return "tokenizer.json"


def load_tokenizer(spec: str, folder: Path | None = None) -> Tokenizer:
    """The tokenizer ``spec`` names (see the module's table).

    A relative path is looked up in ``folder`` first where one is given: shards
    carry their tokenizer beside them. Raises InputError where the spec is of no
    known kind, a file is missing or malformed, or a package is not installed.
    """
    if spec == "byte":
        return ByteTokenizer()
    if spec == "gpt2":
        return GPT2Tokenizer()
    if spec.startswith("gpt2:"):
        return _load_gpt2_files(spec)
    path = folder / spec if folder and (folder / spec).exists() else Path(spec)
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"tokenizer {spec!r} is neither a known kind nor a file; give {KINDS}")
    tokenizers = _require("tokenizers", spec)
    inner = _parse(spec, lambda: tokenizers.Tokenizer.from_file(str(path)))
    path = path.resolve()  # the spec is kept in checkpoints: it must hold from anywhere
    name = path.parent.name if path.stem == "tokenizer" else path.stem
    return FileTokenizer(inner, str(path), name)


def _load_gpt2_files(spec: str) -> FileTokenizer:
    vocab, merges = _gpt2_paths(spec)
    tokenizers = _require("tokenizers", spec)
    from tokenizers import decoders, models, pre_tokenizers

    model = _parse(spec, lambda: models.BPE.from_file(str(vocab), str(merges)))
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if inner.token_to_id(GPT2_EOT) is not None:
        inner.add_special_tokens([GPT2_EOT])
    return FileTokenizer(inner, f"gpt2:{vocab.resolve()},{merges.resolve()}", "gpt2")


def _gpt2_paths(spec: str) -> tuple[Path, Path]:
    """vocab and merges; OpenAI's own names (encoder.json, vocab.bpe) are known too."""
    where = spec.removeprefix("gpt2:")
    if "," in where and not Path(where).is_dir():
        vocab, _, merges = where.partition(",")
        pairs = [(Path(vocab.strip()), Path(merges.strip()))]
    else:
        names = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
        pairs = [(Path(where, vocab), Path(where, merges)) for vocab, merges in names]
    for pair in pairs:
        if all(path.is_file() for path in pair):
            return pair
    missing = next(path for path in pairs[0] if not path.is_file())
    raise InputError(f"tokenizer {spec!r} needs the file {missing}, which does not exist")


def _parse(spec: str, load: Any) -> Any:
    try:
        return load()
    except Exception as error:  # the Rust library raises bare Exception
        reason = " ".join(str(error).split())
        raise InputError(
            f"tokenizer {spec!r} could not be read ({reason}); give {KINDS}"
        ) from error


def _require(package: str, spec: str, what: str = "tokenizer") -> Any:
    try:
        return __import__(package)
    except ImportError as error:
        raise InputError(
            f"{what} {spec!r} needs the package {package}: pip install 'deeploop[data]'"
        ) from error


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one; ``position`` is how much of the source lies behind it."""

    text: str
    starts: bool
    position: int


def text_files(source: Path) -> list[Path]:
    """``source`` itself, or the text, jsonl and parquet files of the folder by name."""
    files = [source] if source.is_file() else sorted(source.iterdir())
    known = [file for file in files if file.suffix in READERS]
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
            except ValueError as error:
                raise InputError(f"{path} line {number} is not JSON ({error}); mend it") from error
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                raise InputError(
                    f"{path} line {number} has no string under {field!r}, only {keys}; "
                    "set text_field"
                )
            yield (text,), file.tell


def _read_parquet(path: Path, field: str) -> Iterator[Document]:
    """One document per row of the column ``field``; nulls are skipped."""
    _require("pyarrow", str(path), what="data path")
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
