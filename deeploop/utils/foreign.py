"""Read files that others wrote: of no known kind, size or syntax, refused in one sentence."""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from deeploop.utils.errors import InputError

MAX_JSON = 2**24  # bytes of a JSON file; more than any configuration or description has
FILE_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
}  # fmt: skip


def open_regular(path: Path, what: str = "") -> BufferedReader:
    """Open a file for reading, without waiting on a named pipe or a device.

    Args:
        path: followed where it is a link.
        what: name of the file in an error, such as "tokenizer 'x.json'"; empty: the path.

    Raises:
        InputError: the file is absent, may not be read, or is not a regular file.
    """
    what = what or str(path)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(
            f"{what}: cannot be read ({reason}); restore it or give another path"
        ) from error
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise InputError(
            f"{what}: is {FILE_KINDS.get(kind, 'something else')}, not a regular file; give a file"
        )
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, what: str = "", most: int = MAX_JSON) -> bytes:
    """Return the bytes of a regular file; raises InputError where they are more than `most`."""
    what = what or str(path)
    with open_regular(path, what) as file, foreign(what):
        data = file.read(most + 1)
    if len(data) > most:
        raise InputError(f"{what}: is larger than {most:,} bytes; give a smaller file")
    return data


def read_json(
    path: Path, what: str = "", types: Mapping[str, Any] | None = None, most: int = MAX_JSON
) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: a regular file of at most `most` bytes.
        what: name of the file in an error; empty: the path.
        types: the type of each field that is needed, or a tuple of types. A name that ends
            in "?" may be absent. An int passes as a float, a bool does not pass as an int.

    Raises:
        InputError: the file cannot be read, is no JSON object, or a field has another type.
    """
    what = what or str(path)
    data = read_bytes(path, what, most)
    with foreign(what):
        values = json.loads(data)
    if not isinstance(values, dict):
        raise InputError(f"{what}: is not a JSON object; restore the file")
    for name, wanted in (types or {}).items():
        kinds = wanted if isinstance(wanted, tuple) else (wanted,)
        kinds += (int,) if float in kinds else ()
        field = name.removesuffix("?")
        if field not in values:
            if field == name:
                raise InputError(f"{what}: has no {field!r}; restore the file")
        elif type(values[field]) not in kinds:
            names = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise InputError(
                f"{what}: {field} is {brief(values[field])}, not of type {names}; restore the file"
            )
    return values


@contextmanager
def foreign(
    what: str, remedy: str = "restore the file", failed: str = "is not readable"
) -> Iterator[None]:
    """Raise InputError, naming `what`, for any error of a parser on a file of unknown origin.

    Parsers raise many kinds, and those in Rust a BaseException where they panic. Errors that
    the file does not cause, such as an interrupt, pass.
    """
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"  # pyo3_runtime's, not importable
        if not (panic or isinstance(error, Exception)):
            raise
        known = isinstance(error, OSError) and error.strerror
        lines = str(known or error).strip().splitlines() or [type(error).__name__]
        reason = "nested too deeply" if isinstance(error, RecursionError) else lines[-1]
        raise InputError(f"{what}: {failed} ({brief(reason.strip())}); {remedy}") from error


def brief(value: Any, most: int = 120) -> str:
    """Return a value as one short line of text for an error; a text without its quotes."""
    try:
        text = str(value) if isinstance(value, str | Exception) else repr(value)
    except RecursionError:
        text = "deeply nested"
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= most else text[:most] + "..."
