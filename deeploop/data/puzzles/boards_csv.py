"""Read the csv files of Sudoku-Extreme and Maze-Hard: source, question, answer, rating."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from deeploop.data.batches import mix, permute
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief, foreign, open_regular

COLUMNS = 4
UNKNOWN = 255
MAX_CELLS = 4096


class CsvBoards(NamedTuple):
    """Questions and answers of a file, and how its maker rated them."""

    boards: np.ndarray  # uint8 [n, 2, cells]
    ratings: np.ndarray  # int64 [n]


def read_boards(path: Path, symbols: Mapping[str, int]) -> CsvBoards:
    """Read the boards of a csv file, whose first line names the columns.

    Args:
        path: a regular file.
        symbols: the number of each character.

    Raises:
        InputError: a line has other columns, another length, another character or no rating.
    """
    table = bytearray([UNKNOWN] * 256)
    for symbol, number in symbols.items():
        table[ord(symbol)] = number
    cells, ratings, text = 0, [], bytearray()
    with open_regular(path) as file, foreign(str(path), failed="is not such a csv file"):
        rows = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""), strict=True)
        next(rows, None)
        for row in filter(None, rows):  # blank lines are nothing
            where = f"{path} line {rows.line_num}"
            if len(row) != COLUMNS:
                raise InputError(f"{where}: has {len(row)} columns, not {COLUMNS}; fix the file")
            both = [side.encode().translate(table) for side in row[1:3]]
            cells = cells or len(both[0])
            if not 0 < cells <= MAX_CELLS or any(len(side) != cells for side in both):
                raise InputError(
                    f"{where}: has boards of {len(both[0])} and {len(both[1])} cells, but the "
                    f"first has {cells}, and {MAX_CELLS} is the most; fix the file"
                )
            if any(UNKNOWN in side for side in both) or not row[3].lstrip("-").isdecimal():
                known = brief("".join(symbols))
                raise InputError(
                    f"{where}: must have boards of the characters {known!r} and a whole number as "
                    "the rating; fix the file"
                )
            ratings.append(min(int(row[3][:12]), 1 << 40))
            text += both[0] + both[1]
    if not ratings:
        raise InputError(f"{path}: has no boards; give the right file")
    boards = np.frombuffer(text, np.uint8).reshape(-1, 2, cells)
    return CsvBoards(boards, np.array(ratings, np.int64))


def chosen(boards: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draw `count` boards, none twice, by the seed, in the file's order; 0, or too many: all."""
    total = len(boards)
    if not 0 < count < total:
        return boards
    key = mix(np.array([seed + 1], np.uint64))
    drawn = permute(np.arange(count, dtype=np.uint64), total, np.repeat(key, count))
    return boards[np.sort(drawn.astype(np.int64))]
