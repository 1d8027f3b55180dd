"""Check paths that a user gives, lock folders, and write files atomically."""

import errno
import os
import platform
import shutil
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
NO_DIRECTORY_SYNC = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS}


@contextmanager
def disk_errors(what: str, path: Path | None = None) -> Iterator[None]:
    """Raise InputError, naming `what`, where the disk is full, limited or read-only.

    The same for a file where a folder should be, and the reverse; other errors pass. With
    `path`, the error also gives the free space of its disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise unwritable(what, error.strerror or "the write failed", path) from error


def unwritable(what: str, reason: str, path: Path | None) -> InputError:
    """Make the error that `what` could not be written, with the free space of path's disk."""
    free = ""
    if path is not None:
        existing = next((p for p in (path, *path.parents) if p.exists()), Path())
        free = f", {shutil.disk_usage(existing).free / 1e6:,.1f} MB free"
    return InputError(
        f"{what} could not be written ({reason}{free}); "
        "free some space, lift the limit or choose another folder"
    )


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk.

    Nothing for a folder of a file system that cannot sync folders.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_SYNC or not path.is_dir():
            raise
    finally:
        os.close(handle)


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
def exclusive_file(path: Path) -> Iterator[bool]:
    """Create ``path``, naming this process, and delete it at the end.

    A lock for file systems that have none. Yields False, and deletes nothing, where the
    file exists: another process has it, or was killed and left it.
    """
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        yield False
        return
    with os.fdopen(handle, "w") as file:
        file.write(f"process {os.getpid()} on {platform.node()}\n")
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that takes the name ``path`` only once it is complete and on disk.

    An exception inside leaves ``path`` as it was.
    """
    with disk_errors(str(path), path):
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.name}.", suffix=".tmp", dir=path.parent
        )
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            usual_mode(Path(temporary))
            os.replace(temporary, path)
            sync(path.parent)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def usual_mode(path: Path) -> None:
    """Give a file the mode of a new one: some libraries let its owner alone read it."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)


def write_text(path: Path, text: str) -> None:
    """Write a text file completely, or leave it as it was."""
    with atomic_file(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file completely, or leave it as it was; numbers not finite become null."""
    write_text(path, to_json(value, indent=2) + "\n")


def cache_folder() -> Path:
    """Return the user's folder for what can be made again.

    $XDG_CACHE_HOME/deeploop, else ~/.cache/deeploop; for a user without a home, as in many
    containers, a folder of temporary files.
    """
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "deeploop"
    try:
        return Path.home() / ".cache" / "deeploop"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"deeploop-{os.getuid()}"
