"""Read ARC-AGI's tasks, and write their grids as 900 tokens.

A grid is uint8 [rows, columns] of colours 0 to 9, at most 30 x 30. Tokens: 0 pads, 1 ends a grid
(below its last row and right of its last column), colour + 2.
"""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deeploop.data.puzzles.arc_names import COLOURS
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief, foreign, read_bytes

SIDE = 30
TOKENS = SIDE * SIDE
PAD, END, FIRST_COLOUR = 0, 1, 2
VOCAB = COLOURS + FIRST_COLOUR
EVALUATION = "evaluation"
MOST_PAIRS = 100


class Example(NamedTuple):
    """A grid and the one that it becomes; None where the file keeps it back."""

    input: np.ndarray
    output: np.ndarray | None


class Task(NamedTuple):
    """A task: examples that show its rule, and those to solve by it."""

    name: str
    evaluation: bool
    train: list[Example]
    test: list[Example]

    def json(self) -> dict[str, Any]:
        """Return the examples as lists, as in a file of a task."""
        return {
            split: [
                {
                    side: grid.tolist()
                    for side, grid in example._asdict().items()
                    if grid is not None
                }
                for example in examples
            ]
            for split, examples in (("train", self.train), ("test", self.test))
        }


def read_tasks(source: str, folder: Path) -> list[Task]:
    """Read the tasks of a folder, in order of name.

    Args:
        source: the folder's name as the user gave it, for errors.
        folder: holds evaluation/ and other folders, such as training/, of one json file a task:
            {"train": [{"input": grid, "output": grid}, ...], "test": [...]}.

    Raises:
        InputError: there is no task, a file is none, or two have one name.
    """
    if not folder.is_dir():
        raise InputError(f"ARC folder {source!r}: is not a folder; give the one above training/")
    files = sorted(folder.glob("*/*.json"), key=lambda path: (path.stem, str(path)))
    tasks = []
    for path in files:
        with foreign(str(path)):
            found = json.loads(read_bytes(path))
        tasks.append(parse_task(str(path), path.stem, path.parent.name == EVALUATION, found))
    if not tasks:
        raise InputError(
            f"ARC folder {source!r}: has no training/*.json and no evaluation/*.json; give the "
            "folder above these two"
        )
    for one, other in itertools.pairwise(tasks):
        if one.name == other.name:
            raise InputError(f"ARC folder {source!r}: has two tasks {one.name!r}; remove one")
    return tasks


def parse_task(where: str, name: str, evaluation: bool, found: Any) -> Task:
    """Check a task as its json file has it; raises InputError, which begins with `where`.

    The outputs of test examples may be absent, as where answers are secret.
    """
    if not isinstance(found, Mapping) or "|||" in name:
        raise InputError(f"{where}: is not a task; give json with 'train' and 'test'")
    sides: list[list[Example]] = []
    for split in ("train", "test"):
        pairs = found.get(split)
        if not isinstance(pairs, list) or not 0 < len(pairs) <= MOST_PAIRS:
            raise InputError(
                f"{where}: {split} must be a list of 1 to {MOST_PAIRS} pairs; fix the file"
            )
        sides.append([_parse_pair(f"{where}: {split}", pair, split == "test") for pair in pairs])
    return Task(name, evaluation, *sides)


def _parse_pair(where: str, pair: Any, optional: bool) -> Example:
    if not isinstance(pair, Mapping) or "input" not in pair:
        raise InputError(f"{where}: a pair has no input; fix the file")
    if "output" not in pair and not optional:
        raise InputError(f"{where}: a pair has no output; fix the file")
    output = _parse_grid(where, pair["output"]) if pair.get("output") is not None else None
    return Example(_parse_grid(where, pair["input"]), output)


def _parse_grid(where: str, rows: Any) -> np.ndarray:
    good = (
        isinstance(rows, list)
        and 0 < len(rows) <= SIDE
        and all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows)
        and 0 < len(rows[0]) <= SIDE
        and all(type(c) is int and 0 <= c < COLOURS for row in rows for c in row)
    )
    if not good:
        raise InputError(
            f"{where}: {brief(rows, 60)} is not a grid of 1 to {SIDE} equal rows of 1 to {SIDE} "
            f"colours 0 to {COLOURS - 1}; fix the file"
        )
    return np.array(rows, np.uint8)


def encode(grid: np.ndarray, top: int = 0, left: int = 0) -> np.ndarray:
    """Write a grid at a place of a 30 x 30 board, with its ends: uint8 [900]."""
    rows, columns = grid.shape
    bottom, right = top + rows, left + columns
    board = np.full((SIDE, SIDE), PAD, np.uint8)
    board[top:bottom, left:right] = grid + FIRST_COLOUR
    if bottom < SIDE:
        board[bottom, left:right] = END
    if right < SIDE:
        board[top:bottom, right] = END
    return board.ravel()
