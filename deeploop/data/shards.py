"""Token shards on disk, and streams of tokens over any number of them.

Three layouts of ``.bin`` file are read as they are, all little-endian:

====================  ==========================================  ======
layout                header                                      tokens
====================  ==========================================  ======
llm.c, modded-nanogpt 256 int32: magic 20240520, version 1, ntok   uint16
llm.c's Llama-3 form  256 int32: magic 20240801, version 7, ntok   uint32
nanoGPT               none; only as ``train.bin`` and ``val.bin``  uint16
====================  ==========================================  ======

The two llm.c layouts are also what is written: the first when every id fits in
16 bits, the second otherwise. A headerless file is known by its name alone, so
that a damaged header is refused rather than read as tokens. (A GPT-2 file cannot
look like a header by chance: both magics hold a token id above 50256.)

Shards are read with one positioned read per window, not mapped. Nothing is ever
read whole, and unlike a memory map this keeps no descriptor per shard (a corpus
of a thousand shards passes the usual limit of 1024), adds nothing to the resident
set, and turns a file truncated under a running job into a sentence, not SIGBUS.
"""

import hashlib
import io
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deeploop.utils.disk import atomic_file, exclusive
from deeploop.utils.errors import InputError

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
LAYOUTS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
HEADERLESS = ("train.bin", "val.bin")
META = "meta.json"  # written last beside shards: what tokenizer they hold, and how many
UNFINISHED = ".unfinished"  # stands in a folder for as long as it is being written
OURS = re.compile(r"_(train|val)_\d{6}\.bin$|^\..*\.tmp$|^meta\.json$")  # what a rerun replaces
SPLIT_NAME = re.compile(r"(?<![a-z])(train|val)(?:ing|id|idation)?(?![a-z])", re.IGNORECASE)
MAX_VOCAB = 1 << 24  # ids a vocabulary may have: no tokenizer comes near, a damaged field does
BLOCK = 1 << 20  # tokens per read wherever a stream is walked from end to end


class Segment(Protocol):
    """A run of tokens that can be read anywhere."""

    @property
    def label(self) -> str: ...

    def __len__(self) -> int: ...

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length), unsigned, in the segment's own dtype."""
        ...


@dataclass(frozen=True)
class ArraySegment:
    """Tokens held in memory: only for corpora that are small by construction."""

    label: str
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, length: int) -> np.ndarray:
        return self.tokens[start : start + length]


@dataclass(frozen=True)
class FileSegment:
    """``count`` tokens of ``dtype`` in the file ``label``, from byte ``offset`` on."""

    label: str
    offset: int
    dtype: str
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, length: int) -> np.ndarray:
        size = np.dtype(self.dtype).itemsize
        buffer = bytearray(length * size)
        try:
            # Unbuffered and opened per read: no descriptor outlives the call.
            with open(self.label, "rb", buffering=0) as file:
                file.seek(self.offset + start * size)
                got = _read_fully(file, memoryview(buffer))
        except OSError as error:
            raise InputError(
                f"shard {self.label} can no longer be read ({error.strerror}); restore it"
            ) from error
        if got != length * size:
            raise InputError(
                f"shard {self.label} ends at token {start + got // size}, short of the "
                f"{self.count} it held when it was opened; restore the file"
            )
        return np.frombuffer(buffer, self.dtype)


def _read_fully(file: io.FileIO, view: memoryview) -> int:
    """Fill ``view``; returns the bytes got, fewer only at the end of the file."""
    got = 0
    while got < len(view) and (step := file.readinto(view[got:])):
        got += step
    return got


class TokenStream:
    """Tokens [start, stop) of the concatenated ``segments``, read on demand.

    Every id that leaves a stream has been compared with ``vocab_size``: on a GPU
    an id past the embedding is an opaque device-side assert, here it is a sentence
    that names the shard, the offset, the id and the vocabulary.
    """

    def __init__(
        self, segments: Iterable[Segment], vocab_size: int, start: int = 0, stop: int | None = None
    ) -> None:
        self.segments = tuple(segments)
        self.vocab_size = vocab_size
        self._ends = np.cumsum([len(segment) for segment in self.segments], dtype=np.int64)
        total = int(self._ends[-1]) if self.segments else 0
        self.start = start
        self.stop = total if stop is None else stop
        if not 0 <= self.start <= self.stop <= total:
            raise IndexError(f"view [{start}, {stop}) of a stream of {total} tokens")

    def __len__(self) -> int:
        return self.stop - self.start

    def view(self, start: int, stop: int) -> "TokenStream":
        """Tokens [start, stop) of this stream, as a stream; nothing is read."""
        return TokenStream(self.segments, self.vocab_size, self.start + start, self.start + stop)

    def read(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) as int64, across shard boundaries.

        Raises InputError on an id outside the vocabulary, IndexError outside the
        stream (negative positions included: they are never counted from the end).
        """
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f"tokens [{start}, {start + length}) of a stream of {len(self)}")
        out = np.empty(length, np.int64)
        position, filled = self.start + start, 0
        index = int(np.searchsorted(self._ends, position, side="right"))
        while filled < length:
            segment = self.segments[index]
            local = position + filled - (int(self._ends[index]) - len(segment))
            take = min(length - filled, len(segment) - local)
            tokens = segment.read(local, take)
            self._check(tokens, segment.label, local)
            out[filled : filled + take] = tokens
            filled += take
            index += 1
        return out

    def blocks(self, size: int = BLOCK) -> Iterator[np.ndarray]:
        """The whole stream in order, ``size`` tokens at a time, int64."""
        for start in range(0, len(self), size):
            yield self.read(start, min(size, len(self) - start))

    def parts(self, size: int) -> Iterator["TokenStream"]:
        """Views of ``size`` tokens each (the last may be shorter) that make up the stream."""
        for start in range(0, len(self), size):
            yield self.view(start, min(start + size, len(self)))

    def sample_check(self, blocks: int = 64, size: int = 4096) -> None:
        """Check the ids of ``blocks`` evenly spaced blocks: a wrong tokenizer shows at once.

        What it misses is still caught by ``read``, before it reaches a model.
        """
        for _ in self._samples(blocks, size):
            pass

    def fingerprint(self) -> str:
        """SHA-256 over evenly spaced blocks: over all of a stream of up to a million tokens."""
        digest = hashlib.sha256()
        for ids in self._samples(256, 4096):
            digest.update(ids.tobytes())
        return digest.hexdigest()

    def _samples(self, blocks: int, size: int) -> Iterator[np.ndarray]:
        size = min(size, len(self))
        for start in np.linspace(0, len(self) - size, blocks, dtype=np.int64):
            yield self.read(int(start), size)

    def _check(self, tokens: np.ndarray, label: str, offset: int) -> None:
        if np.iinfo(tokens.dtype).max < self.vocab_size or not len(tokens):
            return
        if int(tokens.max()) >= self.vocab_size:
            at = int(np.argmax(tokens >= self.vocab_size))
            raise InputError(
                f"shard {label} has token id {int(tokens[at])} at offset {offset + at}, but "
                f"vocab_size is {self.vocab_size}: ids must be below it; set the vocab_size "
                "or tokenizer the shard was written with"
            )


def open_shard(path: Path) -> FileSegment:
    """A shard of any of the three layouts, its header checked against its size."""
    try:
        with open(path, "rb") as file:
            size = path.stat().st_size
            header = np.frombuffer(file.read(12), "<i4", count=min(3, size // 4))
    except OSError as error:
        raise InputError(f"shard {path} cannot be read ({error.strerror}); mend that") from error
    if size == 0:
        raise InputError(f"shard {path} is empty; write it again")
    magic = int(header[0]) if len(header) else None
    if magic in LAYOUTS:
        return _open_with_header(path, size, header)
    if path.name not in HEADERLESS:
        raise InputError(
            f"shard {path} starts with magic {magic}, not {' or '.join(map(str, LAYOUTS))}; "
            "files without a header must be called train.bin or val.bin"
        )
    if size % 2:
        raise InputError(f"shard {path} has {size} bytes, which is no whole number of uint16")
    return FileSegment(str(path), 0, "<u2", size // 2)


def _open_with_header(path: Path, size: int, header: np.ndarray) -> FileSegment:
    if size < HEADER_BYTES:
        raise InputError(
            f"shard {path} has a torn header: {size} bytes of {HEADER_BYTES}; write it again"
        )
    magic, version, tokens = (int(x) for x in header)
    expected, dtype = LAYOUTS[magic]
    if version != expected:
        raise InputError(
            f"shard {path} has version {version}; magic {magic} is read as version {expected}"
        )
    if tokens < 1:
        raise InputError(f"shard {path} has ntok {tokens} in its header; it must be at least 1")
    held = size - HEADER_BYTES
    if held != tokens * np.dtype(dtype).itemsize:
        raise InputError(
            f"shard {path} has ntok {tokens} in its header but {held} bytes of tokens, not "
            f"{tokens * np.dtype(dtype).itemsize}: it is torn; write or download it again"
        )
    return FileSegment(str(path), HEADER_BYTES, dtype, tokens)


@dataclass(frozen=True)
class ShardSet:
    """What a file or folder of shards holds; ``meta`` is empty where there is none."""

    train: list[FileSegment]
    val: list[FileSegment]  # empty for a single shard: the caller splits it
    meta: dict[str, Any]


def open_shards(path: Path) -> ShardSet:
    """The shards in a folder (or one file), sorted by name and told apart.

    Validation is what has ``val`` as a word of its name (and no ``train`` after it),
    else the first of several shards, as llm.c and modded-nanogpt have it.
    """
    if path.is_file():
        return ShardSet([open_shard(path)], [], {})
    if (path / UNFINISHED).exists():
        raise InputError(f"data folder {path} is unfinished; run the same 'deeploop data' again")
    meta = _read_meta(path)
    names = sorted(meta.get("shards", ())) or sorted(file.name for file in path.glob("*.bin"))
    for name in names:
        if not (path / name).is_file():
            raise InputError(f"data folder {path} lacks the shard {name} its {META} lists")
    shards = [open_shard(path / name) for name in names]
    val = [shard for shard, name in zip(shards, names, strict=True) if _is_val(name)]
    if not val and len(shards) > 1:
        val = shards[:1]
    train = [shard for shard in shards if shard not in val]
    if not train:
        raise InputError(f"data folder {path} has no training shard, only {', '.join(names)}")
    return ShardSet(train, val, meta)


def _is_val(name: str) -> bool:
    return [word.lower() for word in SPLIT_NAME.findall(name)][-1:] == ["val"]


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / META
    if not path.exists():
        return {}
    try:
        meta = json.loads(path.read_text())
        if _is_meta(meta):
            return meta
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise InputError(f"{path} is no shard description this version reads; prepare the data again")


def _is_meta(meta: Any) -> bool:
    """Whether every field has a value that can be used."""
    names, vocab = meta["shards"], meta["vocab_size"]
    tokenizer, counts = meta.get("tokenizer"), meta.get("bytes", {}).values()
    return (
        bool(names)
        and all(Path(name).name == name for name in names)
        and type(vocab) is int
        and 0 < vocab <= MAX_VOCAB
        and (tokenizer is None or isinstance(tokenizer, str))
        and all(count is None or (type(count) is int and count >= 0) for count in counts)
    )


def shard_dtype(vocab_size: int) -> str:
    """The narrower of the two llm.c layouts that holds every id below ``vocab_size``."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def write_shard(path: Path, blocks: Iterable[np.ndarray], dtype: str) -> int:
    """Write one llm.c shard atomically from blocks of ids; returns how many there were."""
    magic, (version, _) = next(item for item in LAYOUTS.items() if item[1][1] == dtype)
    header = np.zeros(HEADER_INTS, "<i4")
    count = 0
    with atomic_file(path) as file:
        file.write(header.tobytes())
        for block in blocks:
            file.write(block.astype(dtype).tobytes())
            count += len(block)
        header[:3] = magic, version, count
        file.seek(0)
        file.write(header.tobytes())
    return count


@contextmanager
def claimed_folder(folder: Path) -> Iterator[None]:
    """Write into ``folder`` alone, leaving it marked unfinished unless all goes well.

    It must be new, empty, or left unfinished before: then shards of the earlier
    attempt are removed. A folder that got no further than its mark is removed too.
    """
    mark = folder / UNFINISHED
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output {folder} is a file; give a folder that is new or empty")
    if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
        raise InputError(f"output folder {folder} is not empty; give one that is new or empty")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output folder {folder} cannot be made ({error.strerror})") from error
    with exclusive(mark, wait=False) as held:
        if held is False:
            raise InputError(f"output folder {folder} is being written by another process; wait")
        for old in folder.iterdir():
            if OURS.search(old.name):
                old.unlink()
        try:
            yield
        except BaseException:
            files = [file for file in folder.rglob("*") if file.is_file()]
            if all(file == mark or file.suffix == ".lock" for file in files):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        mark.unlink()
