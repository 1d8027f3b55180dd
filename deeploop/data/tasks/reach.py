"""Reachability by hops: the root that each node leads to. Difficulty: the most hops to a root.

    3>5 0>0 5>5 2>3 4>1 1>0 ? 4 0 3 2 1 5          and at the last six tokens:  0 0 5 5 0 5
    (16 edges, here 6; 2 hops)

Each of 16 nodes leads to one other, a root to itself. The edges are a token each ("3>5": 3 leads to
5) and come in a drawn order; the nodes' names are drawn, too. They make as many chains of
`difficulty` hops as there is room for; the nodes that are left are roots. After "?" come all nodes
in a drawn order; the answer to each, predicted at it, is the root that it leads to. No answer is
read, so none helps with another.

All chains are alike: nothing but following one says where it ends. A model that follows an edge in
each loop needs `difficulty` loops for the beginnings of the chains, and in any further loop every
node stays at its root. Before that the nodes nearer to a root are right already.

An edge is one token, because a small model takes far longer to learn to read an edge from two.
"""

import numpy as np

from deeploop.data.tasks.base import Example, Task, digits
from deeploop.data.tasks.draw import Draw

NODES = 16


class Reach(Task):
    """The edges of a graph in a drawn order, "?", and all nodes in another: the root of each."""

    symbols = (".", "?", *digits(NODES), *(f"{a}>{b}" for a in range(NODES) for b in range(NODES)))

    def places(self, difficulty: int) -> np.ndarray:
        return np.arange(2 * NODES + 1) > NODES

    def choices(self, difficulty: int) -> int:
        return chains(difficulty)  # a root that ends none is named only once

    def examples(self, draw: Draw, difficulty: int) -> Example:
        # Node c * (difficulty + 1) + k of the graph is k hops away from the root of chain c.
        chain = np.arange(chains(difficulty) * (difficulty + 1)).reshape(-1, difficulty + 1)
        after, root = np.arange(NODES), np.arange(NODES)
        after[chain[:, 1:]], root[chain] = chain[:, :-1], chain[:, :1]
        names, order, asked = draw.order(NODES), draw.order(NODES), draw.order(NODES)
        node, edge, mark = self.ids("0", "0>0", "?")
        edges = np.take_along_axis(edge + names * NODES + names[:, after], order, 1)
        questions = node + np.take_along_axis(names, asked, 1)
        answers = node + np.take_along_axis(names[:, root], asked, 1)
        return np.concatenate((edges, np.full((draw.n, 1), mark), questions), 1), answers


def chains(difficulty: int) -> int:
    """Return how many chains of so many hops the nodes make."""
    return NODES // (difficulty + 1)
