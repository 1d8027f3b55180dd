"""Count a branch as torch.compile would run it, with fake tensors and no code generated.

Dynamo and AOTAutograd trace a branch and decide which tensors its backward needs saved, as they
do for Inductor. Each half then runs operator by operator, so that `memory.LiveBytes` counts the
saved tensors. Time is that of the fused graph: matrix products, attention and custom ops are
separate kernels; all other operators fuse, and move only the tensors that such a kernel made
or takes, or that the graph returns. This is the lower bound of Inductor's choices: a tensor that
two fused kernels read counts once.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from deeploop.analyze.plan.roofline import FLOPS, Clock, Work, size, tensors, works


def backend(clock: Clock) -> Callable[..., Any]:
    """Make a backend for `module.compile` that runs eagerly and counts the fused graph."""

    def compile_graph(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        passes = fused(graph)

        def run(*args: Any) -> Any:
            with clock.instead(passes):
                return graph.forward(*args)

        return make_boxed_func(run)

    return aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )


def fused(graph: GraphModule) -> list[Work]:
    """Return the passes of one graph: those that do not fuse, then one for all the others."""
    passes: list[Work] = []
    inputs: set[Node] = set()  # nodes that a fused kernel reads
    moved = 0
    for node in graph.graph.nodes:
        if node.op != "call_function" or is_view(node):
            continue
        if has_own_kernel(node):
            args, kwargs = map_arg((node.args, node.kwargs), value)
            out = value(node)
            passes += works(node.target, args, kwargs, out, tensors((args, kwargs)), tensors(out))
            continue
        inputs |= {source(n) for n in node.all_input_nodes}
        if is_stored(node):
            moved += nbytes(node)
    moved += sum(nbytes(n) for n in inputs if n.op != "call_function" or has_own_kernel(n))
    return [*passes, Work("elementwise", 0, moved)]


def value(node: Node) -> Any:
    """Return the fake result of a node."""
    return node.meta["val"]


def nbytes(node: Node) -> int:
    """Return the bytes of a node's result."""
    return sum(size(x) for x in tensors(value(node)))


def has_own_kernel(node: Node) -> bool:
    """Return whether Inductor would not fuse a node: a product, attention or a custom op."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.overloadpacket in FLOPS or node.target.namespace == "deeploop"


def is_view(node: Node) -> bool:
    """Return whether a node's result is a view, or an element, of another's."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def source(node: Node) -> Node:
    """Return the node that made the memory that this one views."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_stored(node: Node) -> bool:
    """Return whether a fused node's result is written to memory.

    It is if a node that does not fuse takes it, or the graph returns it.
    """
    return any(
        user.op == "output" or has_own_kernel(user) or (is_view(user) and is_stored(user))
        for user in node.users
    )
