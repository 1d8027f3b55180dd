"""The ops compile as one node, for any number of rows; test_updates.py has the contract."""

import pytest
import torch
from functorch.compile import make_boxed_func
from kernel_cases import OPS, make_gradients, make_inputs, run
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


@every_op
def test_fullgraph_matches_eager_over_row_counts(op):
    """One static compile, one for any number of rows, and no more."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op.fused, backend=counter, fullgraph=True)
    for n_rows in (5, 6, 9, 12, 31):
        inputs = make_inputs(op, (n_rows, 16), torch.float32)
        gradients = make_gradients(inputs)
        eager, traced = (run(fn, op, inputs, gradients) for fn in (op.fused, compiled))
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
    assert counter.frame_count == 2


@every_op
def test_two_loops_sharing_a_gain(op):
    """A looped model norms by the same parameter many times; its gradients add up."""
    torch.compiler.reset()
    inputs = make_inputs(op, (6, 16), torch.float32)

    def walk(h, f, *rest):
        n = f
        for factor in (1.0, 2.0, 3.5):
            h, n = op.fused(h, n, *rest[:-2], factor, rest[-1])
        return h, n

    compiled = torch.compile(walk, backend="aot_eager", fullgraph=True)
    gradients = make_gradients(inputs)
    eager, traced = (run(fn, op, inputs, gradients) for fn in (walk, compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


@every_op
def test_backward_is_one_node(op):
    torch.compiler.reset()
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(op.fused, backend=backend, fullgraph=True)
    inputs = make_inputs(op, (6, 16), torch.float32)
    run(compiled, op, inputs, make_gradients(inputs))
    forward, backward = graphs
    name = {"pre_norm": "linear_update"}.get(op.name, op.name)
    assert forward.count(f"deeploop.{name}.default") == 1
    assert backward.count(f"deeploop.{name}_backward.default") == 1
    # A saved output is detached, which moves nothing; the rest is a few numbers on the host.
    numbers = {f"aten.{word}.default" for word in ("full", "ones", "stack", "cat", "unsqueeze")}
    targets = {t for t in (*forward, *backward) if t.startswith("aten")}
    assert targets <= {"aten.detach.default", "aten.mul.Tensor", *numbers}
