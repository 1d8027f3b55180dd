"""The eight rotations and reflections of a grid, numbered as HRM and TRM number them."""

import numpy as np

COUNT = 8
INVERSE = (0, 3, 2, 1, 4, 5, 6, 7)


def transform(grid: np.ndarray, number: int) -> np.ndarray:
    """Rotate or reflect a grid [rows, columns].

    0 leaves it; 1, 2, 3 turn it by as many quarters counterclockwise; 4 exchanges left and right,
    5 top and bottom; 6 transposes; 7 transposes along the other diagonal.
    """
    if number < 4:
        return np.rot90(grid, number)
    if number < 6:
        return np.flip(grid, 5 - number)
    return grid.T if number == 6 else np.rot90(grid, 2).T


def undo(grid: np.ndarray, number: int) -> np.ndarray:
    """Return the grid that `transform` with this number turns into the given one."""
    return transform(grid, INVERSE[number])
