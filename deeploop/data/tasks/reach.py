"""Reachability by hops: the root that a node leads to. Difficulty: the number of hops to it.

    5 2 0 0 7 4 2 0 1 1 4 1 ... ? 5 0 7 1                   (20 edges, here 6; 2 hops)

Each of 20 nodes leads to one other, and two roots lead to themselves. The 20 edges "from to" come
in a drawn order, and the nodes' names are drawn, too. Two questions follow "?": a node, whose
answer is the root that it leads to.

Both nodes begin a chain of `difficulty` hops, each to another root. The other nodes lead to drawn
nodes of the two chains, never to their ends. The chains are alike: nothing but following one says
which root is at its end. A model that follows an edge in each loop needs `difficulty` loops, and
in any further loop it stays at the root.
"""

import numpy as np

from deeploop.data.tasks.base import Task, digits
from deeploop.data.tasks.draw import Draw

NODES, ROOTS = 20, 2


class Reach(Task):
    """The edges of a graph in a drawn order, "?", and twice a node and the root it leads to."""

    symbols = (".", "?", *digits(range(NODES)))

    def answers(self, difficulty: int) -> np.ndarray:
        question = np.zeros(2 * NODES + 1, bool)
        return np.concatenate((question, np.tile((False, True), ROOTS)))

    def choices(self, difficulty: int) -> int:
        return ROOTS

    def tokens(self, draw: Draw, difficulty: int) -> np.ndarray:
        chain = np.arange(ROOTS)[:, None] * (difficulty + 1) + np.arange(difficulty + 1)
        nexts = np.zeros((draw.n, NODES), np.int64)  # by place in a chain: the root is the first
        nexts[:, chain] = np.maximum(chain - 1, chain[:, :1])
        others = slice(chain.size, NODES)
        count = NODES - chain.size
        of_chain, at = draw.below(ROOTS, count), draw.below(difficulty, count)
        nexts[:, others] = of_chain * (difficulty + 1) + at
        names, order = draw.order(NODES), draw.order(NODES)
        named = np.take_along_axis(names, nexts, 1)
        edges = np.take_along_axis(np.stack((names, named), 2), order[:, :, None], 1)
        asked = draw.order(ROOTS)
        pairs = np.stack((names[:, chain[:, -1]], names[:, chain[:, 0]]), 2)
        questions = np.take_along_axis(pairs, asked[:, :, None], 1)
        first, mark = self.ids("0", "?")
        return np.concatenate(
            (
                first + edges.reshape(draw.n, -1),
                np.full((draw.n, 1), mark),
                first + questions.reshape(draw.n, -1),
            ),
            axis=1,
        )
