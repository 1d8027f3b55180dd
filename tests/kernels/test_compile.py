"""The ops on rows as custom operators: opcheck, and torch.compile without recompiles."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.kernel_cases import (
    CASES,
    EPS,
    FULL,
    chosen,
    make_gradients,
    make_inputs,
    run,
    same_bits,
    some_used,
)

every_op = pytest.mark.parametrize("case", FULL, ids=str)


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    torch.compiler.reset()


class Calls(TorchDispatchMode):
    """Collect the operators of deeploop that run, with their arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "deeploop":
            self.seen.append((operator, args))
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck(case):
    """Both operators of a case, with the arguments it calls them with.

    The backward of a result alone is that of every tensor that the op can take.
    """
    wide = torch.float32
    inputs = make_inputs(case, (2, 3, 8), torch.bfloat16, gains=wide, memories=wide)
    gradients = make_gradients(case, inputs)
    every = some_used(len(gradients))
    with Calls() as calls:
        for used in every:
            run(case.fused, inputs, chosen(gradients, used))
    forward, backward = calls.seen[0][0], calls.seen[1][0]
    assert backward.name() == f"{forward.name()}_backward"
    assert [operator for operator, _ in calls.seen] == [forward, backward] * len(every)
    torch.library.opcheck(*calls.seen[0])
    backwards = calls.seen[1::2]
    for operator, arguments in backwards if case in FULL else backwards[:1]:
        detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        torch.library.opcheck(operator, tuple(detached))


@every_op
def test_fullgraph_and_new_coefficients_compile_nothing(case):
    """One compile for the first numbers, eps too, one for any numbers, and no more."""
    counter = CompileCounterWithBackend("aot_eager")
    inputs = make_inputs(case, (6, 16), torch.float32)
    gradients = make_gradients(case, inputs)

    def scaled(leaves, by):
        factors = {k: v * by for k, v in case.factors.items()}
        return case.fused(leaves, **factors, eps=EPS * (1 + by))

    compiled = torch.compile(scaled, backend=counter, fullgraph=True)
    for by in (1.0, 0.5, 0.25, 0.0, 1.5, 2.0):
        eager = run(lambda xs, by=by: scaled(xs, by), inputs, gradients)
        traced = run(lambda xs, by=by: compiled(xs, by), inputs, gradients)
        assert same_bits(eager, traced)
    assert counter.frame_count == 2


@every_op
def test_compiled_for_any_number_of_rows(case):
    """One static compile, one for any number of rows, and no more."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(case.fused, backend=counter, fullgraph=True)
    for n_rows in (5, 6, 9, 12, 31):
        inputs = make_inputs(case, (n_rows, 16), torch.float32)
        gradients = make_gradients(case, inputs)
        assert same_bits(*(run(fn, inputs, gradients) for fn in (case.fused, compiled)))
    assert counter.frame_count == 2


@every_op
def test_loops_sharing_a_gain(case):
    """A looped model norms by the same parameter many times; its gradients add up."""
    inputs = make_inputs(case, (6, 16), torch.float32)
    gradients = make_gradients(case, inputs)
    branch = case.inputs[1]

    def three_loops(leaves):
        x = dict(zip(case.inputs, leaves, strict=True))
        for factor in (1.0, 2.0, 3.5):
            factors = {name: value * factor for name, value in case.factors.items()}
            results = case.fused([x[name] for name in case.inputs], **factors)
            after = dict(zip(case.results, results, strict=True))
            x |= {branch if name == "n" else name: y for name, y in after.items()}
        return results

    compiled = torch.compile(three_loops, backend="aot_eager", fullgraph=True)
    assert same_bits(*(run(fn, inputs, gradients) for fn in (three_loops, compiled)))


@every_op
def test_backward_is_one_node(case):
    graphs = []

    def keep(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(case.fused, backend=backend, fullgraph=True)
    inputs = make_inputs(case, (6, 16), torch.float32)
    run(compiled, inputs, make_gradients(case, inputs))
    for graph in graphs:
        assert sum(target.startswith("deeploop.") for target in graph) == 1
    forward, backward = (next(t for t in graph if t.startswith("deeploop.")) for graph in graphs)
    assert backward == forward.replace(".default", "_backward.default")
    # A saved output is detached, which moves nothing; the rest is a few numbers on the host.
    numbers = {f"aten.{word}.default" for word in ("full", "ones", "stack", "cat", "unsqueeze")}
    targets = {t for graph in graphs for t in graph if t.startswith("aten")}
    assert targets <= {"aten.detach.default", "aten.mul.Tensor", *numbers}
