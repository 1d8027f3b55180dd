"""branch_sandwich, inject and looping_update on CPU: values, gradients and the contract."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import EPS, double
from test_ops import LAYOUTS, TOLERANCE
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from update_cases import (
    CASES,
    MAIN,
    Case,
    compare,
    make_gradients,
    make_inputs,
    run,
    some_used,
    subsets,
)

from deeploop.kernels import _aten
from deeploop.utils.errors import InputError

every_case = pytest.mark.parametrize("case", CASES, ids=str)
main_cases = pytest.mark.parametrize("case", MAIN, ids=str)
BARE = [Case("post_sandwich", ("w_out", "w_next")), Case("pre_norm", ("w_next",))]
# The two that have value tests of their own in test_ops.py.
EARLIER = [Case("post_sandwich"), Case("pre_norm")]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@every_case
def test_reference_passes_gradcheck(case):
    inputs = [x.requires_grad_() for x in make_inputs(case, (3, 5), torch.float64)]
    assert torch.autograd.gradcheck(lambda *xs: tuple(case.reference(xs)), inputs)


@every_case
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches_reference(case, dtype):
    for shape in [(8,), (1, 1), (5, 7), (2, 3, 64), (2, 1, 3, 33), (0, 4), (2, 0, 4)]:
        inputs = make_inputs(case, shape, dtype)
        compare(case, inputs, make_gradients(case, inputs), **TOLERANCE[dtype])


@every_case
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_another_eps(case, eps):
    inputs = make_inputs(case, (5, 7), torch.float64)
    gradients = make_gradients(case, inputs)
    compare(case, inputs, gradients, eps=eps, **TOLERANCE[torch.float64])


@every_case
def test_every_subset_of_gradients(case):
    inputs = make_inputs(case, (4, 6), torch.float64)
    every = make_gradients(case, inputs)
    for used in some_used(len(every)):
        gradients = [g if u else None for g, u in zip(every, used, strict=True)]
        for needs in subsets(len(inputs)):
            compare(case, inputs, gradients, needs, **TOLERANCE[torch.float64])


@main_cases
def test_frozen_gains_ask_for_no_gain_gradient(case, monkeypatch):
    monkeypatch.setattr(_aten, "column_sum", lambda *_: pytest.fail("computed a frozen gradient"))
    inputs = make_inputs(case, (6, 10), torch.float32)
    needs = [not name.startswith("w_") for name in case.inputs]
    run(case.fused, inputs, make_gradients(case, inputs), needs)


@main_cases
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(case, layout):
    inputs = make_inputs(case, (4, 3, 10), torch.float64)
    gradients = [LAYOUTS[layout](g) for g in make_gradients(case, inputs)]
    compare(case, [LAYOUTS[layout](x) for x in inputs], gradients, **TOLERANCE[torch.float64])


@main_cases
def test_gradient_of_a_sum(case):
    inputs = make_inputs(case, (4, 10), torch.float64)
    one = torch.ones((), dtype=torch.float64).expand(4, 10)
    compare(case, inputs, [one] * len(case.results), **TOLERANCE[torch.float64])


@every_case
def test_nothing_aliases_and_gradients_stay_as_they_were(case):
    inputs = [x.requires_grad_() for x in make_inputs(case, (4, 10), torch.float32)]
    gradients = make_gradients(case, inputs)
    before = [g.clone() for g in (*gradients, *(x.detach() for x in inputs))]
    factors = dict.fromkeys(case.factors, 1.0)
    for used in some_used(len(gradients)):
        results = case.fused(inputs, **factors)
        kept = [y.detach().clone() for y in results]
        outputs = [y for y, u in zip(results, used, strict=True) if u]
        sent = [g for g, u in zip(gradients, used, strict=True) if u]
        got = torch.autograd.grad(outputs, inputs, sent, allow_unused=True)
        tensors = [*results, *inputs, *gradients, *(g for g in got if g is not None)]
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
        after = [*gradients, *inputs, *results]
        assert all(torch.equal(x, y) for x, y in zip(after, (*before, *kept), strict=True))


@main_cases
def test_checkpoint_is_bitwise_equal(case):
    inputs = make_inputs(case, (16, 64), torch.bfloat16, gains=torch.float32)
    gradients = make_gradients(case, inputs)

    def recomputed(leaves):
        return checkpoint(case.fused, leaves, use_reentrant=False)

    plain, again = (run(fn, inputs, gradients) for fn in (case.fused, recomputed))
    for a, b in zip(plain, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def saved_bytes(case, inputs):
    held = {}

    def pack(x):
        held[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
        return x

    leaves = [x.requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        case.fused(leaves)
    return sum(held.values())


@every_case
def test_saves_no_more_than_it_says(case):
    """Rows of activations kept for backward: h and f by the sandwiches, h' by the linear ones."""
    n_rows, d = 64, 256
    inputs = make_inputs(case, (n_rows, d), torch.bfloat16, gains=torch.float32)
    norm = "n" in case.results
    passes = {"post_sandwich": 2, "branch_sandwich": 1 + norm}.get(case.op, int(norm))
    extra = 4 * (2 * n_rows + 2 * d) + 64  # statistics, gains, coefficients
    assert passes * 2 * n_rows * d <= saved_bytes(case, inputs) <= passes * 2 * n_rows * d + extra


# ---------------------------------------------------------------------------
# dtypes


@main_cases
@pytest.mark.parametrize("memories", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_memories_and_stream_keep_their_dtypes(case, memories, stream):
    inputs = make_inputs(case, (8, 64), torch.bfloat16, gains=torch.float32, memories=memories)
    inputs[0] = inputs[0].to(stream)
    results = dict(zip(case.results, case.fused(inputs), strict=True))
    assert results["h"].dtype == stream and results["n"].dtype == torch.bfloat16
    assert all(results[name].dtype == memories for name in ("local", "glob") if name in results)
    compare(case, inputs, make_gradients(case, inputs), **TOLERANCE[torch.bfloat16])


def test_first_memories_are_float32_unless_asked():
    cases = [c for c in CASES if "local" in c.without and "glob" in c.without]
    assert cases
    for case in cases:
        inputs = make_inputs(case, (2, 4), torch.bfloat16)
        assert all(y.dtype == torch.float32 for y in case.fused(inputs)[1:-1])
        asked = case.fused(inputs, memory_dtype=torch.bfloat16)
        assert all(y.dtype == torch.bfloat16 for y in asked)


@main_cases
def test_autocast_changes_nothing(case):
    inputs = make_inputs(case, (32, 64), torch.float32)
    inputs[1] = inputs[1].bfloat16()
    gradients = make_gradients(case, inputs)
    plain = run(case.fused, inputs, gradients)
    with torch.autocast("cpu", torch.bfloat16):
        under = run(case.fused, inputs, gradients)
    for a, b in zip(plain, under, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@main_cases
def test_large_float16_values_do_not_overflow(case):
    inputs = make_inputs(case, (4, 256), torch.float16)
    inputs[:2] = [torch.full_like(inputs[0], 3e4), torch.full_like(inputs[1], 2e4)]
    assert all(y.isfinite().all() for y in case.fused(inputs))


def eager(case, inputs):
    """The same update from plain operators in the tensors' own dtype."""
    x, d = dict(zip(case.inputs, inputs, strict=True)), [inputs[0].shape[-1]]
    k = case.factors
    if case.op == "branch_sandwich":
        h = x["h"] + k["scale"] * F.rms_norm(x["f"], d, x["w_branch"], EPS)
        return [h, F.rms_norm(h, d, x["w_next"], EPS)]
    if case.op == "inject":
        h = k["keep"] * x["h"] + k["add"] * x["x"]
        return [h, F.rms_norm(h, d, x["w_next"], EPS)]
    local = k["decay"] * x["local"] + k["scale"] * x["f"]
    if case.op == "looping_update":
        h = x["h"] + k["read_global"] * x["glob"] + k["read_local"] * local
        return [h, local, F.rms_norm(h, d, x["w_next"], EPS)]
    glob = k["decay"] * x["glob"] + k["read_local"] * local
    h = x["h"] + k["read_local"] * local + k["read_global"] * glob
    return [h, local, glob, F.rms_norm(h, d, x["w_next"], EPS)]


@main_cases
def test_bfloat16_is_no_worse_than_eager_bfloat16(case):
    inputs = make_inputs(case, (64, 256), torch.bfloat16)
    gradients = make_gradients(case, inputs)
    exact = run(case.reference, double(inputs), double(gradients))
    ours = run(case.fused, inputs, gradients)
    theirs = run(lambda xs: eager(case, xs), inputs, gradients)
    for a, b, e in zip(*map(itertools.chain.from_iterable, (ours, theirs, exact)), strict=True):
        # Equal roundings can fall either way; a lost digit would be a factor of 2 and more.
        assert (a.double() - e).norm() <= 1.05 * (b.double() - e).norm()


# ---------------------------------------------------------------------------
# The contract for custom operators


@pytest.mark.parametrize("case", [*CASES, *EARLIER, *BARE], ids=str)
def test_opcheck(case):
    """Both operators of a case, with the arguments it calls them with."""
    name = case.op if case.op.endswith("sandwich") else "linear_update"
    ops = [getattr(torch.ops.deeploop, name + end).default for end in ("", "_backward")]
    calls = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in ops:
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    wide = torch.float32
    inputs = make_inputs(case, (2, 3, 8), torch.bfloat16, gains=wide, memories=wide)
    gradients = make_gradients(case, inputs)
    every = some_used(len(gradients))
    for used in every:
        with Record():
            sent = [g if u else None for g, u in zip(gradients, used, strict=True)]
            run(case.fused, inputs, sent)
    assert [op for op, _ in calls] == ops * len(every)
    torch.library.opcheck(*calls[0])
    for op, arguments in calls[1::2]:
        detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
        torch.library.opcheck(op, tuple(detached))


@pytest.mark.parametrize("case", [*MAIN, *EARLIER], ids=str)
def test_fullgraph_and_new_coefficients_compile_nothing(case):
    """One compile for the first numbers, eps too, one for any numbers, and no more."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    inputs = make_inputs(case, (6, 16), torch.float32)
    gradients = make_gradients(case, inputs)

    def scaled(leaves, by):
        factors = {k: v * by for k, v in case.factors.items()}
        return case.fused(leaves, **factors, eps=EPS * (1 + by))

    compiled = torch.compile(scaled, backend=counter, fullgraph=True)
    for by in (1.0, 0.5, 0.25, 0.0, 1.5, 2.0):
        eager_run = run(lambda xs, by=by: scaled(xs, by), inputs, gradients)
        traced = run(lambda xs, by=by: compiled(xs, by), inputs, gradients)
        for a, b in zip(eager_run, traced, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert counter.frame_count == 2


@main_cases
def test_compiled_for_any_number_of_rows(case):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(case.fused, backend=counter, fullgraph=True)
    for n_rows in (5, 6, 9, 31):
        inputs = make_inputs(case, (n_rows, 16), torch.float32)
        gradients = make_gradients(case, inputs)
        for a, b in zip(
            *(run(fn, inputs, gradients) for fn in (case.fused, compiled)), strict=True
        ):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert counter.frame_count == 2


# ---------------------------------------------------------------------------
# Bad input


@main_cases
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: torch.randn(2, 5)}, r"(f|x) has shape \[2, 5\]; allowed: the shape of h, \[2, 4\]"),
        ({0: torch.ones(2, 4).long()}, r"h has dtype torch.int64; allowed: float16, bfloat16"),
        ({-1: torch.randn(1, 4)}, r"w_next has shape \[1, 4\]; allowed: \[4\] or None"),
        ({-1: torch.ones(4, device="meta")}, r"w_next is on meta; allowed: the device"),
        ({"eps": -1.0}, r"eps is -1.0; allowed: a finite number, 0 or more"),
        ({"norm": False}, r"w_next is given and norm is False; allowed: None without the norm"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(case, changes, message):
    inputs = make_inputs(case, (2, 4), torch.float32)
    options = {k: v for k, v in changes.items() if isinstance(k, str)}
    for i, x in changes.items():
        if isinstance(i, int):
            inputs[i] = x
    with pytest.raises(InputError, match=f"^{case.op}: {message}"):
        case.fused(inputs, **options)


@main_cases
def test_factors_must_be_finite(case):
    inputs = make_inputs(case, (2, 4), torch.float32)
    for name in case.factors:
        message = f"^{case.op}: {name} is inf; allowed: a finite number"
        with pytest.raises(InputError, match=message):
            case.fused(inputs, **{name: float("inf")})
