"""Build Sudoku data sets: drawn boards of three sizes, or Sudoku-Extreme's csv files.

A token is digit + 1, so that an empty cell is 1 and pad is 0. Every cell of the solution is a
target. Puzzles have no identifiers of their own.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deeploop.config.data import difficulties
from deeploop.data.batches import mix
from deeploop.data.puzzles.boards_csv import CsvBoards, chosen, read_boards
from deeploop.data.puzzles.folder import BLANK, SPLITS
from deeploop.data.puzzles.sudoku import (
    FEWEST,
    SHAPES,
    Shape,
    augment,
    classes,
    draw_puzzle,
    relabelled,
    solve,
)
from deeploop.data.puzzles.writer import Group, Written, boards, check_absent, new_set
from deeploop.data.tasks.draw import HELD_OUT, TRAIN, Draw, example_keys
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief

GIVENS = {4: "6", 6: "14", 9: "30"}  # by default
TRIES = 1000  # draws in a row that may be unsuitable
HELD_OUT_CLASSES = 3  # of the 12 classes of solutions of 4x4 boards
_TRANSFORMED = np.uint64(1 << 32)  # sets the draws of copies apart from those of boards


class SudokuSource:
    """Draws the boards of a data set, each a pure function of (seed, split, number).

    No training board has the solution of a test board, nor one that differs in the names of digits
    alone. Of 4x4 boards the test set has 3 of the 12 classes of solutions. That keeps solutions
    apart, and yet is easy: only 288 solutions exist, and the classes are alike but for the order of
    rows and columns.
    """

    def __init__(self, size: int, givens: str, backtracks: int, seed: int):
        if size not in SHAPES:
            raise InputError(f"size={size}: must be one of {', '.join(map(str, SHAPES))}")
        self.shape, self.seed, self.backtracks = SHAPES[size], seed, backtracks
        self.givens = difficulties("givens", givens or GIVENS[size], size**2)
        if self.givens.start < FEWEST[size]:
            raise InputError(
                f"givens={brief(givens)}: a board of {size}x{size} with one solution has at least "
                f"{FEWEST[size]}; give more"
            )
        self.held_out: set[bytes] = set()
        self.seen: set[bytes] = set()
        self.limited = size == 4
        if self.limited:
            every = sorted(board.tobytes() for board in classes(self.shape))
            order = np.argsort(mix(example_keys(seed, HELD_OUT, np.arange(12, dtype=np.uint64))))
            self.held_out = {every[i] for i in order[:HELD_OUT_CLASSES]}

    def draw(self, split: int, count: int) -> Iterator[np.ndarray]:
        """Yield `count` boards with their solutions, uint8 [2, cells]; the test split first.

        Raises InputError where no suitable board turns up any more.
        """
        failed = 0
        for number in itertools.count():
            if not count:
                return
            both = self._suitable(split, number)
            failed = failed + 1 if both is None else 0
            if both is not None:
                count -= 1
                yield both
            elif failed == TRIES:
                raise InputError(
                    f"givens and backtracks: {count} more boards are wanted, but {TRIES} in a row "
                    "did not fit or were known already; ask for fewer puzzles, more givens or "
                    "fewer backtracks"
                )

    def _suitable(self, split: int, number: int) -> np.ndarray | None:
        key = example_keys(self.seed, split, np.array([number], np.uint64))
        board, solution = draw_puzzle(key, self.shape, self.givens)
        kind = relabelled(solution[None], self.shape).tobytes()
        if (
            np.count_nonzero(board) not in self.givens
            or board.tobytes() in self.seen
            or ((self.limited or split == TRAIN) and (kind in self.held_out) == (split == TRAIN))
            or (self.backtracks and solve(board, self.shape).backtracks < self.backtracks)
        ):
            return None
        self.seen.add(board.tobytes())
        if split == HELD_OUT:
            self.held_out.add(kind)
        return np.stack((board, solution))

    def train(self, count: int, copies: int) -> Iterator[Group]:
        """Yield training boards, each with up to `copies` transformed ones."""
        for number, both in enumerate(self.draw(TRAIN, count)):
            moved = transformed(both, self.shape, self.seed, number, copies)
            kinds = relabelled(moved[:, 1], self.shape)
            kept = [kind.tobytes() not in self.held_out for kind in kinds]
            yield tokens(np.concatenate((both[None], moved[kept])))


def transformed(both: np.ndarray, shape: Shape, seed: int, number: int, copies: int) -> np.ndarray:
    """Draw transformed copies of board `number` of a set: uint8 [copies, 2, cells]."""
    first = np.uint64(number) * _TRANSFORMED + _TRANSFORMED
    keys = example_keys(seed, TRAIN, first + np.arange(copies, dtype=np.uint64))
    return augment(both, shape, Draw(keys, shape.size))


def tokens(both: np.ndarray) -> Group:
    """Make a group of boards and solutions uint8 [n, 2, cells]."""
    return boards(both[:, 0] + np.uint8(1), both[:, 1] + np.uint8(1))


def build_sudoku(
    out: str,
    *,
    size: int = 9,
    puzzles: int = 2000,
    test: int = 500,
    givens: str = "",
    backtracks: int = 0,
    augment: int = 0,
    seed: int = 0,
) -> dict[str, Written]:
    """Write a data set of drawn Sudoku boards, each with one solution: the same for equal values.

    Args:
        out: folder to write, new or empty.
        size: 4, 6 (boxes of 2 x 3) or 9.
        puzzles, test: numbers of boards.
        givens: of each board, such as "30" or "24-36"; empty: 6, 14 or 30 by size.
        backtracks: wrong guesses that `solve` makes of each board, at least.
        augment: transformed copies of each training board, at most; none has a solution that is
            held out.
        seed: of all that is drawn.

    Returns:
        By split, what was written.

    Raises:
        InputError: a value is out of range, there are too few such boards, or `out` is not empty.
    """
    check_counts(puzzles=(puzzles, 1), test=(test, 1), augment=(augment, 0))
    check_counts(backtracks=(backtracks, 0), seed=(seed, 0))
    check_absent(user_path(out, "output folder"))
    source = SudokuSource(size, givens, backtracks, seed)
    held_out = [tokens(both[None]) for both in source.draw(HELD_OUT, test)]
    with new_set(out, size + 2, size**2) as writer:
        writer.split("train", source.train(puzzles, augment))
        writer.split("test", held_out)
        writer.names([BLANK])
    return writer.written


def check_counts(**values: tuple[int, int]) -> None:
    """Raise InputError for a value, by its name, that is below the least or above 2^31."""
    for name, (value, least) in values.items():
        if not least <= value < 1 << 31:
            raise InputError(f"{name}={value}: must lie in {least} .. 2^31 - 1")


def build_sudoku_csv(
    out: str,
    source: str,
    *,
    puzzles: int = 0,
    test: int = 0,
    rating: int = 0,
    augment: int = 0,
    seed: int = 0,
) -> dict[str, Written]:
    """Write a data set of Sudoku-Extreme's train.csv and test.csv.

    Args:
        out: folder to write, new or empty.
        source: folder of the two files, with the columns source, question, answer and rating.
        puzzles, test: numbers of boards to draw from them; 0: all.
        rating: least rating of a board of either file.
        augment: transformed copies of each training board.
        seed: of all that is drawn.

    Raises:
        InputError: a file is absent or damaged, a solution is none, or `out` is not empty.
    """
    check_counts(puzzles=(puzzles, 0), test=(test, 0), augment=(augment, 0), seed=(seed, 0))
    check_absent(user_path(out, "output folder"))
    folder, shape = user_path(source, "csv folder"), SHAPES[9]
    read = [_read(folder / f"{split}.csv", shape, rating) for split in SPLITS]
    train, held_out = (
        chosen(both, count, seed) for both, count in zip(read, (puzzles, test), strict=True)
    )
    with new_set(out, shape.size + 2, shape.size**2) as writer:
        writer.split(
            "train",
            (
                tokens(np.concatenate((both[None], transformed(both, shape, seed, i, augment))))
                for i, both in enumerate(train)
            ),
        )
        writer.split("test", (tokens(both[None]) for both in held_out))
        writer.names([BLANK])
    return writer.written


def _read(path: Path, shape: Shape, rating: int) -> np.ndarray:
    """Read the boards of a csv file that are rated highly enough: uint8 [n, 2, cells]."""
    digits = "".join(map(str, range(1, shape.size + 1)))
    read: CsvBoards = read_boards(path, {".": 0, "0": 0} | {d: int(d) for d in digits})
    if read.boards.shape[2] != shape.size**2:
        raise InputError(
            f"{path}: has boards of {read.boards.shape[2]} cells, not {shape.size**2}; give "
            "Sudoku-Extreme's file"
        )
    question, answer = read.boards[:, 0], read.boards[:, 1]
    wrong = ((question != 0) & (question != answer)).any(1) | ~_solved(answer, shape)
    if wrong.any():
        raise InputError(
            f"{path}: the answer of board {int(np.argmax(wrong)) + 1} is not a solution of its "
            "question; restore the file"
        )
    kept = read.boards[read.ratings >= rating]
    if not len(kept):
        raise InputError(f"rating={rating}: no board of {path} is rated as highly; give less")
    return kept


def _solved(boards: np.ndarray, shape: Shape) -> np.ndarray:
    """Return which boards have every digit once in each house: uint8 [n, cells] -> bool [n]."""
    solved = np.ones(len(boards), bool)
    every = np.arange(1, shape.size + 1)
    for kind in shape.houses.T:
        inside = np.argsort(kind, kind="stable").reshape(shape.size, shape.size)
        for cells in inside:
            solved &= (np.sort(boards[:, cells], axis=1) == every).all(1)
    return solved
