"""Puzzle data sets by name, built once into the cache folder that all processes share."""

import functools
from pathlib import Path

from deeploop.data.puzzles.maze_set import build_maze
from deeploop.data.puzzles.sudoku_set import build_sudoku
from deeploop.utils.disk import cache_folder, disk_errors, exclusive

VERSION = 1  # in every folder's name: raise it when a name gives other puzzles

# The registry of generated sets: each takes the folder to write.
SETS = {
    "sudoku-4x4": functools.partial(build_sudoku, size=4, puzzles=2000, test=500, givens="5-7"),
    "sudoku-6x6": functools.partial(build_sudoku, size=6, puzzles=4000, test=500, givens="13-17"),
    "maze-9x9": functools.partial(build_maze, side=9, puzzles=4000, test=500),
}


def generated_set(name: str) -> Path:
    """Return the folder of a set, built if it is absent; raises InputError on a full disk."""
    folder = cache_folder() / "puzzles" / f"{name}-v{VERSION}"
    with disk_errors(f"cache folder {folder.parent}", folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(folder.with_name(f".{folder.name}.lock")):
            if not folder.exists():
                SETS[name](str(folder))
    return folder
