"""Check paths that a user gives, lock folders, and write files completely or not at all."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from deeploop.utils.errors import InputError
from deeploop.utils.strict_json import to_json


def user_path(name: str, field: str) -> Path:
    """Return the path a user gave for `field`, with ~ expanded; it need not exist.

    Raises InputError where no file can have this path: the name is too long or has a
    NUL, the user after ~ is unknown, links form a loop, or a folder may not be entered.
    """
    try:
        path = Path(name).expanduser()
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        shown = repr(name if len(name) < 200 else name[:200] + "...")
        raise InputError(
            f"{field} {shown}: cannot be reached ({reason}); give another path"
        ) from error
    return path


DISK_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST,
    errno.ENOTDIR, errno.EISDIR, errno.EIO,
}  # fmt: skip


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Raise InputError, naming `what`, where the disk is full, limited or read-only.

    The same for a file where a folder should be, and the reverse; other errors pass.
    """
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
    """Lock ``path``, a folder or a file (created if absent), against other processes.

    Yields True once locked; with ``wait`` false, False where another process has the
    lock. Yields None where the platform or the file system has no locks: the caller
    must be correct without one.
    """
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    try:
        locked: bool | None = True
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            locked = False
        except (ImportError, OSError):
            locked = None
        yield locked
    finally:
        os.close(handle)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that takes the name ``path`` only once it is complete and on disk.

    An exception inside leaves ``path`` as it was.
    """
    with disk_errors(str(path)):
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp lets the owner alone read it
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text file completely, or leave it as it was."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file completely, or leave it as it was; numbers not finite become null."""
    write_text(path, to_json(value, indent=2) + "\n")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
