"""Reachability by hops: the node that a path has reached. Difficulty: the hops of a path.

    2 120 021 0 210 102 1 021 201          and at these tokens: 2 0 0 0 2 2 1 2 1
    (24 tokens, here 9; 2 hops)

A graph has layers of 3 nodes, and each node leads to one of the next layer. A token such as "120"
has all edges between two layers: node 0 leads to 1, 1 to 2 and 2 to 0. "2" starts a path at node 2
of a new graph's first layer. The answer at each token is the node that the path has reached by it.
Each path has `difficulty` hops; the first and the last of a sequence may have fewer.

Every node has one edge to it, so nothing but following all edges of a path tells where it is. No
answer is read, so none helps with the next. A model that follows an edge in each loop needs
`difficulty` loops; in any further loop nothing changes.
"""

import itertools

import numpy as np

from deeploop.data.tasks.base import Example, Task, digits
from deeploop.data.tasks.draw import Draw

NODES, LENGTH = 3, 24
EDGES = np.array(list(itertools.permutations(range(NODES))))  # [6, 3]: where each node leads


class Reach(Task):
    """Paths through graphs, one after another; at each token the node that is reached."""

    symbols = (".", *digits(NODES), *("".join(map(str, edges)) for edges in EDGES))

    def places(self, difficulty: int) -> np.ndarray:
        return np.ones(LENGTH, bool)

    def choices(self, difficulty: int) -> int:
        return NODES

    def examples(self, draw: Draw, difficulty: int) -> Example:
        before = draw.below(min(difficulty + 1, LENGTH - difficulty))[:, None]  # a path of d hops
        starts = (np.arange(LENGTH) - before) % (difficulty + 1) == 0
        starts[:, 0] = True
        start, edges = draw.below(NODES, LENGTH), draw.below(len(EDGES), LENGTH)
        reached = start.copy()
        for i in range(1, LENGTH):
            led = EDGES[edges[:, i], reached[:, i - 1]]
            reached[:, i] = np.where(starts[:, i], start[:, i], led)
        node, edge = self.ids("0", "012")
        return np.where(starts, node + start, edge + edges), node + reached
