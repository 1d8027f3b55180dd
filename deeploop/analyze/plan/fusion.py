"""Branches as torch.compile would run them, with fake tensors and no code generated.

Dynamo and AOTAutograd trace a branch and decide what its backward keeps, as they do for
Inductor; each half then runs operator by operator, so that `memory.Live` counts what is
kept. Time is of the fused graph: products, attention and custom ops are kernels of their
own, and all between them moves only what such a kernel made or takes, or the graph
returns. Of Inductor's choices that is the lower bound: what two fused kernels both read
counts once.
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
    """For `module.compile(backend=...)`: runs eagerly, and tells `clock` the fused graph."""

    def prepared(graph: GraphModule, inputs: Any) -> Callable[..., Any]:
        passes = fused(graph)

        def run(*args: Any) -> Any:
            with clock.instead(passes):
                return graph.forward(*args)

        return make_boxed_func(run)

    return aot_autograd(
        fw_compiler=prepared,
        bw_compiler=prepared,
        decompositions=select_decomp_table,
        partition_fn=min_cut_rematerialization_partition,
    )


def fused(graph: GraphModule) -> list[Work]:
    """The passes of one graph."""
    found: list[Work] = []
    read: set[Node] = set()
    moved = 0
    for node in graph.graph.nodes:
        if node.op != "call_function" or looks(node):
            continue
        if alone(node):
            args, kwargs = map_arg((node.args, node.kwargs), value)
            out = value(node)
            found += works(node.target, args, kwargs, out, tensors((args, kwargs)), tensors(out))
            continue
        read |= {source(n) for n in node.all_input_nodes}
        if kept(node):
            moved += of(node)
    moved += sum(of(n) for n in read if n.op != "call_function" or alone(n))
    return [*found, Work("elementwise", 0, moved)]


def value(node: Node) -> Any:
    return node.meta["val"]


def of(node: Node) -> int:
    """Bytes of what a node makes."""
    return sum(size(x) for x in tensors(value(node)))


def alone(node: Node) -> bool:
    """Whether a kernel of its own runs it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.overloadpacket in FLOPS or node.target.namespace == "deeploop"


def looks(node: Node) -> bool:
    """Whether a node only looks at what another made."""
    return node.target is operator.getitem or getattr(node.target, "is_view", False)


def source(node: Node) -> Node:
    """The node that made what this one looks at."""
    while node.op == "call_function" and looks(node):
        node = node.all_input_nodes[0]
    return node


def kept(node: Node) -> bool:
    """Whether what a fused node makes is in memory: a kernel takes it or the graph returns it."""
    return any(
        user.op == "output" or alone(user) or (looks(user) and kept(user)) for user in node.users
    )
