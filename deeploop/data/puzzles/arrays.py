"""Read and write .npy files: a file's own word on shape and type is checked before it is used."""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np

from deeploop.utils.disk import atomic_file
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief, foreign, open_regular

DTYPES = (np.dtype(np.uint8), np.dtype(np.int32), np.dtype(np.int64))


def read_array(path: Path, dimensions: int, mapped: bool = False) -> np.ndarray:
    """Read an array of whole numbers; nothing in the file is executed.

    Args:
        path: a .npy file of uint8, int32 or int64 in C order.
        dimensions: that it must have.
        mapped: map the file into memory, read-only, in the place of reading it.

    Raises:
        InputError: the file is absent, no such array, empty, or of another size than it says.
    """
    with open_regular(path) as file:
        with foreign(str(path), failed="is not a .npy file"):
            shape, dtype = _read_header(file)
        if dtype not in DTYPES:
            names = ", ".join(map(str, DTYPES))
            raise InputError(f"{path}: has dtype {brief(str(dtype))}; must be one of {names}")
        if len(shape) != dimensions or not all(shape):
            raise InputError(
                f"{path}: has shape {brief(shape)}; must have {dimensions} dimensions, none empty"
            )
        start, count = file.tell(), math.prod(shape)
        size = os.fstat(file.fileno()).st_size - start
        if size != count * dtype.itemsize:
            raise InputError(
                f"{path}: has {size:,} bytes of numbers, but shape {brief(shape)} of {dtype} takes "
                f"{count * dtype.itemsize:,}; write or copy it again"
            )
        with foreign(str(path)):
            if mapped:
                return np.memmap(file, dtype, "r", start, shape)
            return np.frombuffer(file.read(size), dtype).reshape(shape)


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version}, not 1.0 or 2.0")
    first = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape {shape}")
    if fortran and len(shape) > 1:
        raise ValueError("numbers in Fortran order")
    return shape, dtype


def write_arrays(path: Path, blocks: Iterable[np.ndarray]) -> int:
    """Write blocks, each [rows, ...] of one dtype, as one array; returns its number of rows.

    The file is complete or absent, and the same as np.save would make of the whole array, which
    is never in memory.
    """
    count, first = 0, None
    with atomic_file(path) as file:
        for block in blocks:
            if first is None:
                first = block[:0]
                _write_header(file, first, 0)
                start = file.tell()
            file.write(np.ascontiguousarray(block, first.dtype).tobytes())
            count += len(block)
        assert first is not None, "no block"
        file.seek(0)
        _write_header(file, first, count)
        assert file.tell() == start, "numpy leaves room in a header for the first axis to grow"
    return count


def _write_header(file: IO[bytes], like: np.ndarray, rows: int) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(like.dtype),
        "fortran_order": False,
        "shape": (rows, *like.shape[1:]),
    }
    np.lib.format.write_array_header_1_0(file, header)
