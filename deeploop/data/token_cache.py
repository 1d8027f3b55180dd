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

from deeploop.data.shards import (
    FileSegment,
    shard_dtype,
)
from deeploop.data.text import encode_to, read_pieces
from deeploop.data.tokenizer import Tokenizer
from deeploop.utils.disk import disk_errors, exclusive
from deeploop.utils.errors import InputError

# (phase, done, total); phase is "tokenise", in bytes of source, or "write", in tokens.
Progress = Callable[[str, int, int], None]
TOKENS, MARKS = "tokens", "marks.npy"
CACHE_VERSION = 1  # part of every cache key: raise it when the same text gives other tokens


def default_cache() -> Path:
    """Where tokenised text is kept: $XDG_CACHE_HOME/deeploop, or ~/.cache/deeploop."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deeploop"


def _tokenised(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    text_field: str,
    root: Path,
    progress: Progress | None,
) -> tuple[FileSegment, np.ndarray]:
    """Tokens of ``files`` and their marks, from a cache built by the first process that asks.

    The folder is built under a temporary name and renamed when whole. A lock makes
    the other ranks of a job wait for the first rather than repeat its work; where
    there are no locks each builds its own and the first rename wins.
    """
    key = _cache_key(files, tokenizer, text_field)
    final, dtype = root / key, shard_dtype(tokenizer.vocab_size)
    with disk_errors(f"cache folder {root}"):
        if found := _open_cache(final, dtype):
            return found
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root / f"{key}.lock") as held:
            if held:  # then no one else is at work, and what is left over is a dead process's
                for stale in root.glob(f"{key}.*.tmp"):
                    shutil.rmtree(stale, ignore_errors=True)
            if not (found := _open_cache(final, dtype)):
                work = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=".tmp", dir=root))
                try:
                    _build_cache(work / "new", files, tokenizer, text_field, progress)
                    _publish_cache(work, final, dtype)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
                found = _open_cache(final, dtype)
    if not found:
        raise InputError(f"cache folder {final} was damaged by another process; run this again")
    return found


def _open_cache(folder: Path, dtype: str) -> tuple[FileSegment, np.ndarray] | None:
    """Tokens and marks; None where there are none or a part of them was deleted."""
    try:
        marks = np.load(folder / MARKS)
        size = (folder / TOKENS).stat().st_size
    except PermissionError:  # another user's: not ours to replace
        raise
    except (OSError, ValueError, EOFError):
        return None
    segment = FileSegment(str(folder / TOKENS), 0, dtype, int(marks[-1, 0]))
    return (segment, marks) if size == len(segment) * np.dtype(dtype).itemsize else None


def _publish_cache(work: Path, final: Path, dtype: str) -> None:
    """Rename what was built; a damaged cache of that name makes way, a whole one stays."""
    if final.exists() and not _open_cache(final, dtype):
        with contextlib.suppress(FileNotFoundError):  # another process saw it too
            os.rename(final, work / "damaged")
    try:
        os.rename(work / "new", final)
    except OSError:
        if not _open_cache(final, dtype):  # else another process was first, with the same content
            raise


def _cache_key(files: Sequence[Path], tokenizer: Tokenizer, text_field: str) -> str:
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
    """Write the tokens of ``files`` (raw, one file of any size) and their marks to ``folder``."""
    folder.mkdir()
    dtype = shard_dtype(tokenizer.vocab_size)
    total = sum(file.stat().st_size for file in files)
    with open(folder / TOKENS, "wb") as out:
        marks = encode_to(
            tokenizer,
            read_pieces(files, text_field),
            lambda ids: out.write(ids.astype(dtype).tobytes()),
            spacing=max(4096, total >> 16),
            progress=lambda done: progress("tokenise", done, total) if progress else None,
        )
        out.flush()
        os.fsync(out.fileno())  # a cache that survives a power cut is whole
    if not marks[-1, 0]:
        raise InputError(f"data path {files[0]} is empty; give a file with text in it")
    np.save(folder / MARKS, marks)
