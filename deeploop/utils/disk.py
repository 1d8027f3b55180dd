"""Paths a user gives, and files written whole or not at all."""

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from deeploop.utils.errors import InputError


def user_path(name: str, field: str) -> Path:
    """The path a user gave, ~ expanded; it need not exist.

    Raises InputError where none can be: a name too long or with a NUL, the home of
    nobody, a loop of links, or behind a folder that may not be entered.
    """
    try:
        path = Path(name).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        shown = repr(name if len(name) < 200 else name[:200] + "...")
        raise InputError(f"{field} {shown}: cannot be reached ({reason}); give another") from error
    return path


DISK_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST,
    errno.ENOTDIR, errno.EISDIR, errno.EIO,
}  # fmt: skip


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn a full, limited, read-only or misplaced folder into a sentence; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise InputError(
            f"{what} could not be written ({error.strerror}); "
            "free some space, lift the limit or choose another folder"
        ) from error


@contextmanager
def exclusive(path: Path, wait: bool = True) -> Iterator[bool | None]:
    """Hold the lock on ``path``, a folder or a file (made where there is none).

    Yields True, or False where another process holds it; with ``wait`` it is waited
    for. Yields None where the platform or the file system has no locks, and there
    the caller must be correct without.
    """
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        held: bool | None = True
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            held = False
        except (ImportError, OSError):
            held = None
        yield held
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the name ``path`` only once it is whole and on disk."""
    with disk_errors(str(path)):
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes it private
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """The file at ``path`` with this text, or as it was."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
