"""Hash files, so that changed content is noticed even where size and time are the same."""

import hashlib
from pathlib import Path
from typing import IO

from deeploop.utils.foreign import foreign, open_regular

SMALL = 1 << 28  # bytes: a corpus up to this size is hashed completely at every start
SAMPLES, SAMPLE = 16, 1 << 14  # evenly spaced blocks that are hashed of a larger one; their bytes
_BLOCK = 1 << 20


def file_hash(path: Path, *, whole: bool, offset: int = 0, size: int | None = None) -> str:
    """Return the SHA-256 of a file's bytes [offset, offset + size), in hexadecimal.

    Args:
        path: a regular file.
        whole: hash every byte; else the size and SAMPLES evenly spaced blocks.
        offset: first byte.
        size: bytes; None: up to the end of the file.

    Raises:
        InputError: the file cannot be read.
    """
    with open_regular(path) as file, foreign(str(path), failed="cannot be read"):
        if size is None:
            size = file.seek(0, 2) - offset
        digest = hashlib.sha256()
        if whole:
            _update(digest, file, offset, size)
        else:
            digest.update(f"{size} bytes".encode())
            for index in range(SAMPLES):
                start = max(0, size - SAMPLE) * index // (SAMPLES - 1)
                _update(digest, file, offset + start, min(SAMPLE, size))
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", file: IO[bytes], start: int, size: int) -> None:
    file.seek(start)
    while size > 0 and (block := file.read(min(size, _BLOCK))):
        digest.update(block)
        size -= len(block)
