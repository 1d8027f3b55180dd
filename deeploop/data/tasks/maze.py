"""Small mazes: the way from one cell to another. Difficulty: its number of steps.

    e  start:s  s            the cells of a maze of 3 x 3; in the task it has 5 x 5
    s  es       s            row by row, and the answers:
    e  x        goal:x       e start:s s s es s e x goal:x S E S

A maze's passages are a spanning tree, so there is one way between two cells. A cell's token says
whether it is open to the east ("e"), to the south ("s"), to both or to neither ("x"), and whether
the way starts or ends there. The answers are the way's steps: N, E, S, W.

The passages are the cheapest tree under drawn costs (Prim). Bansal 2022 (arXiv 2202.05826) reads
mazes as pictures and marks the cells of the way.
"""

import numpy as np

from deeploop.data.tasks.base import NextTokenTask, last
from deeploop.data.tasks.draw import Draw

SIDE = 5
CELLS = SIDE * SIDE
OPENINGS = ("x", "e", "s", "es")  # bit 0: to the east, bit 1: to the south
ROLES = ("", "start:", "goal:")
STEPS = {"N": -SIDE, "E": 1, "S": SIDE, "W": -1}  # and how far a step moves along the cells

_CELLS = np.arange(CELLS)
_EAST, _SOUTH = _CELLS[_CELLS % SIDE < SIDE - 1], _CELLS[: CELLS - SIDE]
_FIRST = np.concatenate((_EAST, _SOUTH))  # of the two cells of each passage
_SECOND = np.concatenate((_EAST + 1, _SOUTH + SIDE))
_BIT = np.repeat((1, 2), (len(_EAST), len(_SOUTH)))


class Maze(NextTokenTask):
    """25 cells of a maze and the `difficulty` steps from its start to its goal.

    Opposite corners are at least 8 steps apart, so every maze has ways of up to 8.
    """

    symbols = (".", *STEPS, *(role + opening for role in ROLES for opening in OPENINGS))

    def places(self, difficulty: int) -> np.ndarray:
        return last(difficulty, CELLS + difficulty)

    def choices(self, difficulty: int) -> int:
        return len(STEPS)

    def answered(self, draw: Draw, difficulty: int) -> np.ndarray:
        openings, distance = _mazes(draw)
        rows = np.arange(draw.n)
        pairs = np.where(distance == difficulty, draw.uniform(CELLS, CELLS), -1)
        start, goal = np.divmod(pairs.reshape(draw.n, -1).argmax(1), CELLS)
        roles = np.zeros_like(openings)
        roles[rows, start], roles[rows, goal] = 1, 2
        north, cell = self.ids("N", "x")
        steps = north + _way(distance, start, goal, difficulty)
        return np.concatenate((cell + roles * len(OPENINGS) + openings, steps), axis=1)


def _mazes(draw: Draw) -> tuple[np.ndarray, np.ndarray]:
    """Draw mazes: openings int64 [n, CELLS], and steps between cells int64 [n, CELLS, CELLS]."""
    cost, rows = draw.uniform(len(_FIRST)), np.arange(draw.n)
    openings = np.zeros((draw.n, CELLS), np.int64)
    distance = np.zeros((draw.n, CELLS, CELLS), np.int8)
    inside = np.tile(_CELLS == 0, (draw.n, 1))
    for _ in range(CELLS - 1):
        leaves = inside[:, _FIRST] != inside[:, _SECOND]
        passage = np.where(leaves, cost, 2).argmin(1)
        a, b = _FIRST[passage], _SECOND[passage]
        old, new = np.where(inside[rows, a], (a, b), (b, a))
        openings[rows, a] += _BIT[passage]
        inside[rows, new] = True
        # Distances to cells that are not inside yet are overwritten once these are.
        distance[rows, new] = distance[rows, :, new] = distance[rows, old] + 1
        distance[rows, new, new] = 0
    return openings, distance


def _way(distance: np.ndarray, start: np.ndarray, goal: np.ndarray, length: int) -> np.ndarray:
    """Return the steps of ways of one length as places in STEPS: int64 [n, length]."""
    rows, cell = np.arange(len(start)), start
    to_goal = distance[rows, goal]
    steps = np.empty((len(start), length), np.int64)
    moves = np.array(list(STEPS.values()))
    for step in range(length):
        onward = (distance[rows, cell] == 1) & (to_goal == length - step - 1)
        after = onward.argmax(1)
        steps[:, step] = ((after - cell)[:, None] == moves).argmax(1)
        cell = after
    return steps
