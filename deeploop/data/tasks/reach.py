"""Reachability by hops: the root that a node leads to. Difficulty: the number of hops to it.

    5 2 0 0 7 4 2 0 1 1 4 1 6 4 3 2 ... ? 5 7 6 3            (16 edges, here 8; 2 hops)
                                          0 1 1 0

Each of 16 nodes leads to one other, and two roots lead to themselves. The 16 edges "from to" come
in a drawn order, and the nodes' names are drawn, too. After "?" comes every node that is exactly
`difficulty` hops away from a root; the answer to a node, predicted at it, is that root. No answer
is read, so none helps with another.

From each root a chain leads back difficulty - 1 hops, and all nodes that are left lead to the end
of one of the two chains. The chains are alike: nothing but following one says which root is at its
end. A model that follows an edge in each loop needs `difficulty` loops, and in any further loop it
stays at the root.
"""

import numpy as np

from deeploop.data.tasks.base import Example, Task, digits
from deeploop.data.tasks.draw import Draw

NODES, ROOTS = 16, 2


class Reach(Task):
    """The edges of a graph in a drawn order, "?", and the nodes to find the root of."""

    symbols = (".", "?", *digits(range(NODES)), *(f"{node}>" for node in range(NODES)))

    def places(self, difficulty: int) -> np.ndarray:
        asked = NODES - ROOTS * difficulty
        return np.arange(2 * NODES + 1 + asked) > 2 * NODES

    def choices(self, difficulty: int) -> int:
        return ROOTS

    def examples(self, draw: Draw, difficulty: int) -> Example:
        chain = np.arange(ROOTS)[:, None] * difficulty + np.arange(difficulty)  # the root is first
        asked = np.arange(chain.size, NODES)
        root_of = draw.below(ROOTS, len(asked))
        after = np.tile(np.arange(NODES), (draw.n, 1))
        after[:, chain[:, 1:]] = chain[:, :-1]
        after[:, asked] = chain[root_of, -1]
        nodes, order = draw.order(NODES), draw.order(NODES)
        mark, to, leads = self.ids("?", "0", "0>")
        edges = np.stack((leads + nodes, to + np.take_along_axis(nodes, after, 1)), 2)
        edges = np.take_along_axis(edges, order[:, :, None], 1).reshape(draw.n, -1)
        answers = to + np.take_along_axis(nodes, chain[root_of, 0], 1)
        question = np.full((draw.n, 1), mark), leads + nodes[:, asked]
        return np.concatenate((edges, *question), 1), answers
