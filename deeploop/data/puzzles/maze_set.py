"""Build maze data sets: drawn mazes of any size, or the csv files of Maze-Hard (30 x 30)."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from deeploop.data.puzzles import symmetries
from deeploop.data.puzzles.boards_csv import chosen, read_boards
from deeploop.data.puzzles.folder import BLANK, SPLITS
from deeploop.data.puzzles.maze import LARGEST, SMALLEST, SYMBOLS, VOCAB, draw_maze
from deeploop.data.puzzles.sudoku_set import TRIES, check_counts
from deeploop.data.puzzles.writer import Group, Written, boards, check_absent, new_set
from deeploop.data.tasks.draw import HELD_OUT, TRAIN, example_keys
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError


def build_maze(
    out: str,
    *,
    side: int = 9,
    puzzles: int = 1000,
    test: int = 200,
    steps: int = 0,
    augment: bool = False,
    seed: int = 0,
) -> dict[str, Written]:
    """Write a data set of drawn mazes: the same for equal values.

    No maze is a turned or reflected form of another one.

    Args:
        out: folder to write, new or empty.
        side: of a maze in tokens, with its walls.
        puzzles, test: numbers of mazes.
        steps: least length of the way from start to goal; 0: the side.
        augment: write each training maze in its 8 turned and reflected forms.
        seed: of all that is drawn.

    Returns:
        By split, what was written.

    Raises:
        InputError: a value is out of range, there are too few such mazes, or `out` is not empty.
    """
    check_counts(puzzles=(puzzles, 1), test=(test, 1), steps=(steps, 0), seed=(seed, 0))
    if not SMALLEST <= side <= LARGEST:
        raise InputError(f"side={side}: must lie in {SMALLEST} .. {LARGEST}")
    check_absent(user_path(out, "output folder"))
    steps, seen = steps or side, set[bytes]()
    held_out = [boards(*mazes) for mazes in _drawn(HELD_OUT, test, side, steps, seed, seen)]
    train = _drawn(TRAIN, puzzles, side, steps, seed, seen)
    with new_set(out, VOCAB, side * side) as writer:
        writer.split("train", (_group(both, augment) for both in train))
        writer.split("test", held_out)
        writer.names([BLANK])
    return writer.written


def _drawn(
    split: int, count: int, side: int, steps: int, seed: int, seen: set[bytes]
) -> Iterator[np.ndarray]:
    """Yield mazes with their solutions, uint8 [2, 1, tokens], that are new up to symmetry."""
    failed = 0
    for number in itertools.count():
        if not count:
            return
        both = draw_maze(example_keys(seed, split, np.array([number], np.uint64)), side, steps)
        form = b"" if both is None else min(x.tobytes() for x in forms(both[0]))
        if both is not None and form not in seen:
            seen.add(form)
            count, failed = count - 1, 0
            yield np.stack(both)[:, None]
            continue
        failed += 1
        if failed == TRIES:
            raise InputError(
                f"side={side}, steps={steps}: {count} more mazes are wanted, but {TRIES} in a row "
                "were too short or known already; ask for fewer puzzles, a larger side or fewer "
                "steps"
            )


def forms(maze: np.ndarray) -> np.ndarray:
    """Return the 8 turned and reflected forms of a maze: uint8 [tokens] -> uint8 [8, tokens]."""
    side = math.isqrt(len(maze))
    grid = maze.reshape(side, side)
    return np.stack([symmetries.transform(grid, i).ravel() for i in range(symmetries.COUNT)])


def _group(both: np.ndarray, augment: bool) -> Group:
    return boards(forms(both[0, 0]), forms(both[1, 0])) if augment else boards(*both)


def build_maze_csv(
    out: str,
    source: str,
    *,
    puzzles: int = 0,
    test: int = 0,
    augment: bool = False,
    seed: int = 0,
) -> dict[str, Written]:
    """Write a data set of train.csv and test.csv with the columns of Maze-Hard.

    Args:
        out: folder to write, new or empty.
        source: folder of the two files; a maze is a square of the characters "# SGo".
        puzzles, test: numbers of mazes to draw from them; 0: all.
        augment: write each training maze in its 8 turned and reflected forms.
        seed: of what is drawn.

    Raises:
        InputError: a file is absent or damaged, the mazes are no squares or of two sizes, or `out`
            is not empty.
    """
    check_counts(puzzles=(puzzles, 0), test=(test, 0), seed=(seed, 0))
    check_absent(user_path(out, "output folder"))
    folder = user_path(source, "csv folder")
    train, held_out = (read_boards(folder / f"{split}.csv", SYMBOLS).boards for split in SPLITS)
    size = train.shape[2]
    if math.isqrt(size) ** 2 != size or held_out.shape[2] != size:
        raise InputError(
            f"csv folder {source!r}: mazes have {size} tokens in train and {held_out.shape[2]} in "
            "test; must be the same square number"
        )
    train, held_out = chosen(train, puzzles, seed), chosen(held_out, test, seed)
    with new_set(out, VOCAB, size) as writer:
        writer.split("train", (_group(both[:, None], augment) for both in train))
        writer.split("test", (boards(*both[:, None]) for both in held_out))
        writer.names([BLANK])
    return writer.written
