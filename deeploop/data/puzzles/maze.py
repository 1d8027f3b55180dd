"""Draw mazes as pictures, with the way from start to goal: tokens of Maze-Hard.

#####      1 wall "#", 2 free " ", 3 start "S", 4 goal "G", 5 the way between them "o"
#S#G#
#o#o#      0 pads; the way is in the labels alone
#ooo#
#####
"""

import numpy as np

from deeploop.data.tasks.draw import Draw

SYMBOLS = {"#": 1, " ": 2, "S": 3, "G": 4, "o": 5}
VOCAB = len(SYMBOLS) + 1
WALL, FREE, START, GOAL, WAY = SYMBOLS.values()
SMALLEST, LARGEST = 5, 63


def draw_maze(key: np.ndarray, side: int, steps: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Draw a maze of side x side tokens and its solution: a pure function of the key.

    The passages are a spanning tree, which a walk carves that turns to a drawn neighbour and back
    where there is none. So there is one way between two places. With an even side the right and
    the lower wall are two thick.

    Args:
        key: uint64 [1].
        side: SMALLEST to LARGEST.
        steps: least length of the way from start to goal.

    Returns:
        Input and label, uint8 [side * side] each; None where nothing is that far from the start.
    """
    cells = (side - 1) // 2
    draw = Draw(key, side)
    turns = np.argsort(draw.words(cells * cells, 4)[0], axis=1, kind="stable")
    start, choice = draw.below(cells * cells)[0], draw.uniform()[0]
    before, distance = _carve(int(start), cells, turns.tolist())
    far = np.flatnonzero(2 * distance >= steps)
    far = far[far != start]
    if not len(far):
        return None
    goal = int(far[int(choice * len(far))])
    picture = np.full((side, side), WALL, np.uint8)
    row, column = np.divmod(np.arange(cells * cells), cells)
    picture[2 * row + 1, 2 * column + 1] = FREE
    picture[row + row[before] + 1, column + column[before] + 1] = FREE  # between neighbours
    label, cell = picture.copy(), goal
    while cell != start:
        last = int(before[cell])
        label[2 * row[cell] + 1, 2 * column[cell] + 1] = WAY
        label[row[cell] + row[last] + 1, column[cell] + column[last] + 1] = WAY
        cell = last
    for grid in (picture, label):
        grid[2 * row[start] + 1, 2 * column[start] + 1] = START
        grid[2 * row[goal] + 1, 2 * column[goal] + 1] = GOAL
    return picture.ravel(), label.ravel()


def _carve(start: int, cells: int, turns: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Walk from the start to all cells; the way to each is the tree's, and so the only one.

    Returns the cell before each, the start's own for itself, and its distance from the start in
    cells: int64 [cells * cells] each.
    """
    before = [-1] * (cells * cells)
    distance = [0] * (cells * cells)
    before[start], path = start, [start]
    while path:
        cell = path[-1]
        row, column = divmod(cell, cells)
        possible = (row > 0, column < cells - 1, row < cells - 1, column > 0)
        for turn in turns[cell]:
            after = cell + (-cells, 1, cells, -1)[turn]
            if possible[turn] and before[after] < 0:
                before[after], distance[after] = cell, distance[cell] + 1
                path.append(after)
                break
        else:
            path.pop()
    return np.array(before), np.array(distance)
