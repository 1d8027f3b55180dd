"""Sudoku boards of 4x4, 6x6 and 9x9 cells: solve, draw with one solution, and transform them.

A board is uint8 [size * size], row by row; 0 is an empty cell.
"""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from deeploop.data.tasks.draw import Draw


@dataclasses.dataclass(frozen=True)
class Shape:
    """A board's shape: boxes of `height` rows and `width` columns, and size = height * width."""

    height: int
    width: int

    @property
    def size(self) -> int:
        """Number of rows, of columns and of digits."""
        return self.height * self.width

    @functools.cached_property
    def houses(self) -> np.ndarray:
        """The row, the column and the box of each cell, numbered apart: int64 [cells, 3]."""
        row, column = np.divmod(np.arange(self.size**2), self.size)
        box = row // self.height * self.height + column // self.width
        return np.stack((row, self.size + column, 2 * self.size + box), axis=1)


SHAPES = {4: Shape(2, 2), 6: Shape(2, 3), 9: Shape(3, 3)}


class Solved(NamedTuple):
    """What a search has seen: the solutions, up to its limit, and the wrong guesses before."""

    solutions: list[np.ndarray]
    backtracks: int


def solve(board: np.ndarray, shape: Shape, limit: int = 2) -> Solved:
    """Search for solutions of a board, until there are `limit`.

    The cell with the fewest possible digits is filled first, with the lowest of them; a guess is
    wrong where no solution follows from it. Cells are compared in order, so that equal boards have
    equal numbers of wrong guesses.
    """
    search = _Search(shape, limit)
    if search.place(board):
        search.run()
    return Solved(search.solutions, search.backtracks)


class _Search:
    def __init__(self, shape: Shape, limit: int, preferred: list[list[int]] | None = None) -> None:
        self.houses = [tuple(x) for x in shape.houses.tolist()]
        self.limit, self.preferred = limit, preferred
        self.all = (1 << shape.size) - 1
        self.used = [0] * (3 * shape.size)  # bits of the digits in each house
        self.cells = [0] * len(self.houses)
        self.empty: list[int] = []
        self.solutions: list[np.ndarray] = []
        self.backtracks = 0

    def place(self, board: np.ndarray) -> bool:
        """Fill in the given cells; returns whether no house has a digit twice."""
        for cell, digit in enumerate(board.tolist()):
            if not digit:
                self.empty.append(cell)
                continue
            bit = 1 << (digit - 1)
            if any(self.used[house] & bit for house in self.houses[cell]):
                return False
            self._set(cell, digit, bit)
        return True

    def _set(self, cell: int, digit: int, bit: int) -> None:
        a, b, c = self.houses[cell]
        self.cells[cell] = digit
        self.used[a] |= bit
        self.used[b] |= bit
        self.used[c] |= bit

    def run(self) -> bool:
        """Fill the empty cells in all ways; returns whether there is one."""
        if not self.empty:
            self.solutions.append(np.array(self.cells, np.uint8))
            return True
        used, every, fewest, place, bits = self.used, self.all, 99, 0, 0
        for i, cell in enumerate(self.empty):
            a, b, c = self.houses[cell]
            free = every & ~(used[a] | used[b] | used[c])
            count = free.bit_count()
            if count < fewest:
                fewest, place, bits = count, i, free
                if count < 2:
                    break
        if not bits:
            return False
        cell = self.empty[place]
        self.empty[place] = self.empty[-1]
        self.empty.pop()
        found = self._try(cell, bits, fewest)
        self.empty.append(self.empty[place] if place < len(self.empty) else cell)
        self.empty[place] = cell
        self.cells[cell] = 0
        return found

    def _try(self, cell: int, bits: int, count: int) -> bool:
        found = False
        a, b, c = self.houses[cell]
        used = self.used
        for digit in self._digits(cell, bits):
            bit = 1 << (digit - 1)
            self._set(cell, digit, bit)
            right = self.run()
            used[a] &= ~bit
            used[b] &= ~bit
            used[c] &= ~bit
            self.backtracks += count > 1 and not right
            found |= right
            if len(self.solutions) >= self.limit:
                break
        return found

    def _digits(self, cell: int, bits: int) -> list[int]:
        order = self.preferred[cell] if self.preferred else range(1, bits.bit_length() + 1)
        return [digit for digit in order if bits >> (digit - 1) & 1]


FEWEST = {4: 4, 6: 8, 9: 17}  # givens that a board with one solution can have


def draw_puzzle(key: np.ndarray, shape: Shape, givens: range) -> tuple[np.ndarray, np.ndarray]:
    """Draw a board with one solution, and the solution: a pure function of the key.

    A full board is searched for with drawn orders of digits, which does not draw all boards evenly.
    Its cells are then emptied in a drawn order, but for those without which there would be a second
    solution, until a number of givens drawn from `givens` is left. It may have more.

    Args:
        key: uint64 [1].
        givens: numbers to draw from.

    Returns:
        The board and its solution, uint8 [cells] each.
    """
    draw, cells = Draw(key, shape.size), shape.size**2
    preferred = np.argsort(draw.words(cells, shape.size)[0], axis=1, kind="stable") + 1
    search = _Search(shape, 1, preferred.tolist())
    search.place(np.zeros(cells, np.uint8))
    search.run()
    solution = search.solutions[0]
    board, left = solution.copy(), cells
    target = givens[int(draw.below(len(givens))[0])]
    for cell in draw.order(cells)[0].tolist():
        if left == target:
            break
        board[cell] = 0
        if len(solve(board, shape).solutions) == 1:
            left -= 1
        else:
            board[cell] = solution[cell]
    return board, solution


def augment(both: np.ndarray, shape: Shape, draw: Draw) -> np.ndarray:
    """Draw transformed copies of boards that keep rows, columns and boxes what they are.

    Digits are exchanged, and bands, rows in a band, stacks and columns in a stack; a board with
    square boxes may be transposed. The same transformation applies to all boards of a copy.

    Args:
        both: uint8 [boards, cells], such as a puzzle and its solution.
        draw: of as many copies as wanted.

    Returns:
        uint8 [draw.n, boards, cells].
    """
    size, copies = shape.size, np.arange(draw.n)[:, None]
    digits = np.pad(draw.order(size) + 1, ((0, 0), (1, 0))).astype(np.uint8)
    rows, columns = _lines(draw, size, shape.height), _lines(draw, size, shape.width)
    source = rows[:, :, None] * size + columns[:, None]
    transposed = draw.below(2) == 1
    if shape.height == shape.width:
        source[transposed] = source[transposed].swapaxes(1, 2)
    moved = both[:, source.reshape(draw.n, size * size)].swapaxes(0, 1)
    return digits[copies[..., None], moved]


def _lines(draw: Draw, size: int, thick: int) -> np.ndarray:
    """Draw orders of rows that stay together in bands of `thick`: int64 [n, size]."""
    bands = draw.order(size // thick)[:, :, None]
    inside = np.argsort(draw.words(size // thick, thick), axis=2, kind="stable")
    return (bands * thick + inside).reshape(draw.n, size)


def relabelled(solutions: np.ndarray, shape: Shape) -> np.ndarray:
    """Exchange digits so that the first row is 1, 2, ...: uint8 [n, cells] -> uint8 [n, cells].

    Two solutions are of one class, that is, differ in the names of digits alone, where the results
    are equal.
    """
    rows = np.arange(len(solutions))[:, None]
    names = np.zeros((len(solutions), shape.size + 1), np.uint8)
    names[rows, solutions[:, : shape.size]] = np.arange(1, shape.size + 1)
    return names[rows, solutions]


def classes(shape: Shape) -> list[np.ndarray]:
    """Return all classes of solutions of 4x4 boards, 12, as boards whose first row is 1, 2, 3, 4.

    Larger boards have too many: 39,168 of 6x6.
    """
    first = np.zeros(shape.size**2, np.uint8)
    first[: shape.size] = np.arange(1, shape.size + 1)
    return solve(first, shape, limit=13).solutions
