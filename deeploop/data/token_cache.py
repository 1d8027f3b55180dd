"""Tokenise text once into a cache folder that all processes share."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from deeploop.data.shards import shard_dtype
from deeploop.data.stream import FileSegment
from deeploop.data.text import encode_to, read_spans
from deeploop.data.tokenizer import Tokenizer
from deeploop.utils.disk import cache_folder, disk_errors, exclusive
from deeploop.utils.errors import InputError

# (phase, done, total); phase is "tokenise", in bytes of source, or "write", in tokens.
Progress = Callable[[str, int, int], None]
TOKENS, MARKS = "tokens", "marks.npy"
CACHE_VERSION = 1  # in every cache key: raise it when the same text gives other tokens


def default_cache() -> Path:
    """Return the folder for tokenised text: $XDG_CACHE_HOME/deeploop, or ~/.cache/deeploop."""
    return cache_folder()


def tokenise_to_cache(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    text_field: str,
    root: Path,
    progress: Progress | None,
) -> tuple[FileSegment, np.ndarray]:
    """Return the tokens of ``files`` and their marks, tokenising them if not cached yet.

    The cache is built under a temporary name and renamed when complete. A lock makes the
    other ranks of a job wait for the first one; on a file system without locks each builds
    a cache and the first rename wins.

    Args:
        files: text files, in order.
        text_field: field or column with the text.
        root: folder of all caches.
        progress: called with ("tokenise", bytes done, bytes in total).

    Returns:
        The tokens, and marks, int64 [n, 2]: (tokens, bytes of UTF-8) from the start on.

    Raises:
        InputError: a file is refused, or the cache cannot be written or read.
    """
    key = _cache_key(files, tokenizer, text_field)
    final, dtype = root / key, shard_dtype(tokenizer.vocab_size)
    with disk_errors(f"cache folder {root}", root):
        if cached := _open_cache(final, dtype):
            return cached
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root / f"{key}.lock") as locked:
            if locked:  # no other process is building, so temporary folders are of dead ones
                for stale in root.glob(f"{key}.*.tmp"):
                    shutil.rmtree(stale, ignore_errors=True)
            if not (cached := _open_cache(final, dtype)):
                work = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=".tmp", dir=root))
                try:
                    _build_cache(work / "new", files, tokenizer, text_field, progress)
                    _publish_cache(work, final, dtype)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
                cached = _open_cache(final, dtype)
    if not cached:
        raise InputError(f"cache folder {final} was damaged by another process; run this again")
    return cached


def _open_cache(folder: Path, dtype: str) -> tuple[FileSegment, np.ndarray] | None:
    """Open a cache's tokens and marks; None where a file is missing, damaged or too short."""
    try:
        marks = np.load(folder / MARKS)
        size = (folder / TOKENS).stat().st_size
    except PermissionError:  # of another user: must not be replaced
        raise
    except (OSError, ValueError, EOFError):
        return None
    segment = FileSegment(str(folder / TOKENS), 0, dtype, int(marks[-1, 0]))
    return (segment, marks) if size == len(segment) * np.dtype(dtype).itemsize else None


def _publish_cache(work: Path, final: Path, dtype: str) -> None:
    """Rename ``work/new`` to ``final``: replaces a damaged cache there, keeps a complete one."""
    if final.exists() and not _open_cache(final, dtype):
        with contextlib.suppress(FileNotFoundError):  # another process has moved it
            os.rename(final, work / "damaged")
    try:
        os.rename(work / "new", final)
    except OSError:
        if not _open_cache(final, dtype):  # else another process was first, with equal content
            raise


def _cache_key(files: Sequence[Path], tokenizer: Tokenizer, text_field: str) -> str:
    """Hash what the tokens depend on: files (path, size, time), tokenizer and field."""
    stats = [(str(file.resolve()), file.stat()) for file in files]
    facts = [CACHE_VERSION, tokenizer.fingerprint, text_field]
    facts += [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _build_cache(
    folder: Path,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    text_field: str,
    progress: Progress | None,
) -> None:
    """Write the tokens of ``files`` (one file, no header) and their marks to a new ``folder``."""
    folder.mkdir()
    dtype = shard_dtype(tokenizer.vocab_size)
    total = sum(file.stat().st_size for file in files)
    with open(folder / TOKENS, "wb") as out:
        marks = encode_to(
            tokenizer,
            read_spans(files, text_field),
            lambda ids: out.write(ids.astype(dtype).tobytes()),
            spacing=max(4096, total >> 16),
            progress=lambda done: progress("tokenise", done, total) if progress else None,
        )
        out.flush()
        os.fsync(out.fileno())  # before the rename: a power cut must not leave a hole
    if not marks[-1, 0]:
        raise InputError(f"data path {files[0]} is empty; give a file with text in it")
    np.save(folder / MARKS, marks)
