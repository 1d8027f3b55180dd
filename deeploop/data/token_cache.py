"""Tokenise text once into a cache folder that all processes share."""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data import checksums
from deeploop.data.checksums import file_hash
from deeploop.data.shards import shard_dtype
from deeploop.data.stream import FileSegment
from deeploop.data.text import encode_to, read_spans
from deeploop.data.tokenizer import Tokenizer
from deeploop.utils.disk import cache_folder, disk_errors, exclusive, write_json
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import read_json

# (phase, done, total); phase is "tokenise", in bytes of source, or "write", in tokens.
Progress = Callable[[str, int, int], None]
TOKENS, DESCRIPTION = "tokens", "cache.json"
MAX_DESCRIPTION = 1 << 28  # bytes of cache.json, which has a mark every few KiB of text
CACHE_VERSION = 2  # in every cache key: raise it when the same text gives other tokens


@dataclass(frozen=True)
class CachedText:
    """The tokens of some text files.

    ``marks``, int64 [n, 2], has (tokens, bytes they stand for) from the start on, every few
    KiB. ``text_bytes`` counts all text in UTF-8, also what is in no token.
    """

    segment: FileSegment
    marks: np.ndarray
    text_bytes: int


def default_cache() -> Path:
    """Return the folder for tokenised text: $XDG_CACHE_HOME/deeploop, or ~/.cache/deeploop."""
    return cache_folder()


def tokenise_to_cache(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    text_field: str,
    root: Path,
    progress: Progress | None,
    verify: bool = False,
) -> CachedText:
    """Return the tokens of ``files``, tokenising them if not cached yet.

    The cache is built under a temporary name and renamed when complete. A lock makes the
    other ranks of a job wait for the first one; on a file system without locks each builds
    a cache and the first rename wins.

    Args:
        files: text files, in order.
        text_field: field or column with the text.
        root: folder of all caches.
        progress: called with ("tokenise", bytes done, bytes in total).
        verify: compare checksums of the text and of the tokens, whatever their size.

    Raises:
        InputError: a file is refused or changes meanwhile, or the cache cannot be written or
            read.
    """
    key = _cache_key(files, tokenizer, text_field)
    final, dtype = root / key, shard_dtype(tokenizer.vocab_size)
    checked = files if verify else None
    with disk_errors(f"cache folder {root}", root):
        if cached := _open_cache(final, dtype, checked):
            return cached
        root.mkdir(parents=True, exist_ok=True)
        with exclusive(root / f"{key}.lock") as locked:
            if locked:  # no other process is building, so temporary folders are of dead ones
                for stale in root.glob(f"{key}.*.tmp"):
                    shutil.rmtree(stale, ignore_errors=True)
            if not (cached := _open_cache(final, dtype, checked)):
                work = Path(tempfile.mkdtemp(prefix=f"{key}.", suffix=".tmp", dir=root))
                try:
                    _build_cache(work / "new", files, tokenizer, text_field, progress)
                    if _cache_key(files, tokenizer, text_field) != key:
                        raise InputError(
                            f"data path {files[0]}: changed while it was tokenised; run this again"
                        )
                    _publish_cache(work, final, dtype, checked)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
                cached = _open_cache(final, dtype, checked)
    if not cached:
        raise InputError(f"cache folder {final} was damaged by another process; run this again")
    return cached


def _open_cache(folder: Path, dtype: str, sources: Sequence[Path] | None) -> CachedText | None:
    """Open a cache; None where a file is missing, damaged or too short.

    sources: text files, if their hashes and that of the tokens are to be compared whatever
    their size; else only tokens of up to checksums.SMALL bytes are.
    """
    try:
        facts = _read_description(folder / DESCRIPTION)
        segment = FileSegment(str(folder / TOKENS), 0, dtype, facts["tokens"])
        size = facts["tokens"] * np.dtype(dtype).itemsize
        if os.stat(folder / TOKENS).st_size != size:
            return None
        whole = sources is not None or size <= checksums.SMALL
        digest = segment.remember(whole)
        if whole and digest != facts["sha256"]:
            return None
        if sources and [file_hash(path, whole=True) for path in sources] != facts["sources"]:
            return None
        marks = np.array(facts["marks"], np.int64).reshape(-1, 2)
    except (OSError, InputError) as error:
        cause = error.__cause__ if isinstance(error, InputError) else error
        if isinstance(cause, PermissionError):  # of another user: must not be replaced
            raise
        return None
    return CachedText(segment, marks, facts["text_bytes"])


def _read_description(path: Path) -> dict[str, Any]:
    """Read cache.json; raises InputError where it is not as it was written."""
    whole = read_json(path, types={"facts": dict, "sha256": str}, most=MAX_DESCRIPTION)
    if _hash_json(whole["facts"]) != whole["sha256"]:
        raise InputError(f"{path}: its checksum does not match; delete the folder")
    facts: dict[str, Any] = whole["facts"]
    return facts


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _publish_cache(work: Path, final: Path, dtype: str, sources: Sequence[Path] | None) -> None:
    """Rename ``work/new`` to ``final``: replaces a damaged cache there, keeps a complete one."""
    if final.exists() and not _open_cache(final, dtype, sources):
        with contextlib.suppress(FileNotFoundError):  # another process has moved it
            os.rename(final, work / "damaged")
    try:
        os.rename(work / "new", final)
    except OSError:
        if not _open_cache(
            final, dtype, sources
        ):  # else another process was first, with equal content
            raise


def _cache_key(files: Sequence[Path], tokenizer: Tokenizer, text_field: str) -> str:
    """Hash what the tokens depend on: the content of the files, the tokenizer and the field.

    Of files with more than checksums.SMALL bytes together the key has samples of the content,
    the size and the time of change.
    """
    stats = [file.stat() for file in files]
    whole = sum(stat.st_size for stat in stats) <= checksums.SMALL
    facts: list[Any] = [CACHE_VERSION, tokenizer.fingerprint, text_field]
    for file, stat in zip(files, stats, strict=True):
        time = 0 if whole else stat.st_mtime_ns
        facts.append([file.suffixes[-2:], stat.st_size, time, file_hash(file, whole=whole)])
    return _hash_json(facts)[:32]


def _build_cache(
    folder: Path,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    text_field: str,
    progress: Progress | None,
) -> None:
    """Write the tokens of ``files`` (one file, no header) and cache.json to a new ``folder``."""
    folder.mkdir()
    dtype = shard_dtype(tokenizer.vocab_size)
    total = sum(file.stat().st_size for file in files)
    digest = hashlib.sha256()
    with open(folder / TOKENS, "wb") as out:

        def write(ids: np.ndarray) -> None:
            data = ids.astype(dtype).tobytes()
            out.write(data)
            digest.update(data)

        marks, text_bytes = encode_to(
            tokenizer,
            read_spans(files, text_field, tokenizer),
            write,
            spacing=max(4096, total >> 16),
            progress=lambda done: progress("tokenise", done, total) if progress else None,
        )
        out.flush()
        os.fsync(out.fileno())  # before the rename: a power cut must not leave a hole
    if not marks[-1, 0]:
        raise InputError(f"data path {files[0]} has no text in it; give a file with text")
    facts = {
        "tokens": int(marks[-1, 0]),
        "sha256": digest.hexdigest(),
        "sources": [file_hash(path, whole=True) for path in files],
        "text_bytes": text_bytes,
        "marks": marks.tolist(),
    }
    write_json(folder / DESCRIPTION, {"facts": facts, "sha256": _hash_json(facts)})
