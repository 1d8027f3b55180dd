"""Read tokens on demand from files of any size, as one stream over many segments.

Files are read with one positioned read per window, not mapped. Nothing is ever read
completely, and unlike a memory map this keeps no file descriptor per shard (a corpus of
a thousand shards passes the usual limit of 1024), adds nothing to the resident memory,
and turns a file truncated during a run into an InputError, not SIGBUS.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

import numpy as np

from deeploop.data.checksums import file_hash
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import open_regular

BLOCK = 1 << 20  # tokens per read where a stream is read from end to end
HASHED = 1 << 26  # tokens: of a stream up to this length, every token is hashed


class Segment(Protocol):
    """Consecutive tokens that can be read from any position."""

    @property
    def label(self) -> str:
        """Name in error messages; the path of a file."""
        ...

    def __len__(self) -> int: ...

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length) in the unsigned dtype they are stored in."""
        ...


@dataclass(frozen=True)
class ArraySegment:
    """Tokens in memory, for corpora that are small by construction."""

    label: str
    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, start: int, length: int) -> np.ndarray:
        return self.tokens[start : start + length]


@dataclass(frozen=True)
class FileSegment:
    """``count`` tokens of ``dtype`` in the file at path ``label``, from byte ``offset`` on.

    After `remember`, `read` refuses a file whose content has changed since then.
    """

    label: str
    offset: int
    dtype: str
    count: int
    _seen: "_Seen" = field(default_factory=lambda: _Seen(), compare=False, repr=False)

    def __len__(self) -> int:
        return self.count

    def read(self, start: int, length: int) -> np.ndarray:
        size = np.dtype(self.dtype).itemsize
        buffer = bytearray(length * size)
        # Opened per read: no descriptor outlives the call.
        with open_regular(Path(self.label), f"shard {self.label}") as file:
            if self._seen.digest and _stamp(file) != self._seen.stamp:
                self._compare_content(file)
            try:
                file.seek(self.offset + start * size)
                size_read = _read_fully(file, memoryview(buffer))
            except OSError as error:
                raise InputError(
                    f"shard {self.label} can no longer be read ({error.strerror}); restore it"
                ) from error
        if size_read != length * size:
            raise InputError(
                f"shard {self.label} ends at token {start + size_read // size}, but had "
                f"{self.count} tokens when it was opened; restore the file"
            )
        return np.frombuffer(buffer, self.dtype)

    def remember(self, whole: bool) -> str:
        """Return the hash of the tokens as they are now, and compare with it when they are read.

        whole: hash every byte, else samples (`deeploop.data.checksums`).
        """
        with open_regular(Path(self.label), f"shard {self.label}") as file:
            self._seen.stamp = _stamp(file)
        self._seen.whole, self._seen.digest = whole, self._hash(whole)
        return self._seen.digest

    def _hash(self, whole: bool) -> str:
        size = self.count * np.dtype(self.dtype).itemsize
        return file_hash(Path(self.label), whole=whole, offset=self.offset, size=size)

    def _compare_content(self, file: IO[bytes]) -> None:
        """Refuse a file that was written since `remember`, unless its tokens are the same."""
        stamp = _stamp(file)
        if self._hash(self._seen.whole) != self._seen.digest:
            raise InputError(
                f"shard {self.label} has other content than when it was opened; restore it and go "
                "on from the last checkpoint"
            )
        self._seen.stamp = stamp


@dataclass
class _Seen:
    """Size, time and inode of a file when its hash was taken; no hash: not taken yet."""

    stamp: tuple[int, ...] = ()
    whole: bool = False
    digest: str = ""


def _stamp(file: IO[bytes]) -> tuple[int, ...]:
    stat = os.fstat(file.fileno())
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev


def _read_fully(file: IO[bytes], view: memoryview) -> int:
    """Fill ``view``; returns the bytes read, fewer only at the end of the file."""
    size = 0
    while size < len(view) and (step := file.readinto(view[size:])):  # type: ignore[attr-defined]
        size += step
    return size


class TokenStream:
    """Tokens [start, stop) of the concatenated ``segments``, read on demand.

    Every id that is read is compared with ``vocab_size``. On a GPU an id outside the
    embedding is a device-side assert that names nothing; the InputError raised here
    names the shard, the offset, the id and the vocabulary.
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
        """Return tokens [start, stop) of this stream as a stream; reads nothing."""
        return TokenStream(self.segments, self.vocab_size, self.start + start, self.start + stop)

    def read(self, start: int, length: int) -> np.ndarray:
        """Return tokens [start, start + length), int64 [length], across segments.

        Raises InputError on an id outside the vocabulary, IndexError on a position
        outside the stream (negative ones too: they are not counted from the end).
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
        """Read the stream from its start, ``size`` tokens at a time, int64."""
        for start in range(0, len(self), size):
            yield self.read(start, min(size, len(self) - start))

    def chunks(self, size: int) -> Iterator["TokenStream"]:
        """Split the stream into views of ``size`` tokens each; the last may be shorter."""
        for start in range(0, len(self), size):
            yield self.view(start, min(start + size, len(self)))

    def sample_check(self, blocks: int = 64, size: int = 4096) -> None:
        """Check the ids of ``blocks`` evenly spaced blocks, so that a wrong vocabulary shows early.

        An id outside these blocks is found by ``read``, before it reaches a model.
        """
        for _ in self._samples(blocks, size):
            pass

    def fingerprint(self) -> str:
        """Return the SHA-256 of 256 evenly spaced blocks: of every token of up to a million."""
        digest = hashlib.sha256()
        for ids in self._samples(256, 4096):
            digest.update(ids.tobytes())
        return digest.hexdigest()

    def content(self) -> str | None:
        """Return the SHA-256 of every token, as uint32; None for a stream above HASHED tokens."""
        if len(self) > HASHED:
            return None
        digest = hashlib.sha256()
        for ids in self.blocks():
            digest.update(ids.astype("<u4").tobytes())
        return digest.hexdigest()

    def _samples(self, blocks: int, size: int) -> Iterator[np.ndarray]:
        size = min(size, len(self))
        if not size:
            return
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
