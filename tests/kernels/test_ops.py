"""The ops on rows on CPU: values and gradients against the float64 reference, and the contract."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from deeploop.utils.errors import InputError
from tests.helpers.kernel_cases import (
    CASES,
    EPS,
    FULL,
    LAYOUTS,
    chosen,
    compare,
    compare_overflow,
    double,
    every_subset,
    make_gradients,
    make_inputs,
    run,
    same_bits,
    some_used,
)

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_op = pytest.mark.parametrize("case", FULL, ids=str)
TOLERANCE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-11},
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
    torch.float16: {"rtol": 3e-3, "atol": 5e-3},
}
EXACT = TOLERANCE[torch.float64]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# ---------------------------------------------------------------------------
# Values and gradients


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
    compare(case, inputs, make_gradients(case, inputs), eps=eps, **EXACT)


@every_case
@pytest.mark.parametrize("size", [1e19, 1e30])
def test_overflow_is_that_of_eager(case, size):
    compare_overflow(case, 3, 12, size)


@every_case
def test_every_subset_of_gradients(case):
    inputs = make_inputs(case, (4, 6), torch.float64)
    gradients = make_gradients(case, inputs)
    for used, needs in every_subset(case):
        compare(case, inputs, chosen(gradients, used), needs, **EXACT)


@every_op
def test_frozen_gains_ask_for_no_gain_gradient(case):
    """A frozen gain pays for nothing: no sum over the rows is taken."""
    n_rows, d = 6, 10
    inputs = make_inputs(case, (n_rows, d), torch.float32)
    gradients = make_gradients(case, inputs)
    frozen = [not name.startswith("w_") for name in case.inputs]
    for needs, sums in ((frozen, 0), (None, frozen.count(False))):
        with profile(record_shapes=True) as profiled:
            run(case.fused, inputs, gradients, needs)
        shapes = [event.input_shapes for event in profiled.events() if event.name == "aten::mv"]
        assert shapes.count([[d, n_rows], [n_rows]]) == sums


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(case, layout):
    inputs = make_inputs(case, (4, 3, 10), torch.float64)
    gradients = [LAYOUTS[layout](g) for g in make_gradients(case, inputs)]
    compare(case, [LAYOUTS[layout](x) for x in inputs], gradients, **EXACT)


@every_op
def test_gradient_of_a_sum(case):
    """.sum() sends back one value expanded with stride 0."""
    inputs = make_inputs(case, (4, 10), torch.float64)
    one = torch.ones((), dtype=torch.float64).expand(4, 10)
    compare(case, inputs, [one] * len(case.results), **EXACT)


@every_case
@pytest.mark.parametrize("factors", ["ones", "usual"])
def test_nothing_aliases_and_gradients_stay_as_they_were(case, factors):
    """With all factors 1 many results are equal in value, and one tensor could serve as two."""
    inputs = [x.requires_grad_() for x in make_inputs(case, (4, 10), torch.float32)]
    gradients = make_gradients(case, inputs)
    before = [g.clone() for g in (*gradients, *(x.detach() for x in inputs))]
    changes = dict.fromkeys(case.factors, 1.0) if factors == "ones" else {}
    for used in some_used(len(gradients)):
        results = case.fused(inputs, **changes)
        copies = [y.detach().clone() for y in results]
        outputs = [y for y, u in zip(results, used, strict=True) if u]
        sent = [g for g, u in zip(gradients, used, strict=True) if u]
        got = torch.autograd.grad(outputs, inputs, sent, allow_unused=True)
        tensors = [*results, *inputs, *gradients, *(g for g in got if g is not None)]
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
        after = [*gradients, *inputs, *results]
        assert all(torch.equal(x, y) for x, y in zip(after, (*before, *copies), strict=True))


@every_op
def test_checkpoint_is_bitwise_equal(case):
    inputs = make_inputs(case, (16, 64), torch.bfloat16, gains=torch.float32)
    gradients = make_gradients(case, inputs)

    def recomputed(leaves):
        return checkpoint(case.fused, leaves, use_reentrant=False)

    assert same_bits(*(run(fn, inputs, gradients) for fn in (case.fused, recomputed)))


@every_op
def test_no_silent_second_derivative(case):
    inputs = [x.requires_grad_() for x in make_inputs(case, (3, 5), torch.float64)]
    h_new, *_, n = case.fused(inputs)
    (dh,) = torch.autograd.grad((h_new * n).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no autograd formula|does not require grad"):
        dh.sum().backward()


def saved_bytes(case, inputs):
    sizes = {}

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = x.numel() * x.element_size()
        return x

    leaves = [x.requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        case.fused(leaves)
    return sum(sizes.values())


@every_case
def test_saves_no_more_than_it_says(case):
    """Rows of activations saved for backward: h and f by the sandwiches, h' by the linear ones."""
    n_rows, d = 64, 256
    inputs = make_inputs(case, (n_rows, d), torch.bfloat16, gains=torch.float32)
    norm = "n" in case.results
    passes = {"post_sandwich": 2, "branch_sandwich": 1 + norm}.get(case.op, int(norm))
    extra = 4 * (2 * n_rows + 2 * d) + 64  # statistics, gains, coefficients
    assert passes * 2 * n_rows * d <= saved_bytes(case, inputs) <= passes * 2 * n_rows * d + extra


# ---------------------------------------------------------------------------
# dtypes


@every_op
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


@every_op
@pytest.mark.parametrize("branch", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(case, branch):
    inputs = make_inputs(case, (32, 64), torch.float32)
    inputs[1] = inputs[1].to(branch)
    gradients = make_gradients(case, inputs)
    plain = run(case.fused, inputs, gradients)
    with torch.autocast("cpu", torch.bfloat16):
        under = run(case.fused, inputs, gradients)
    assert same_bits(plain, under)


@every_op
def test_large_float16_values_do_not_overflow(case):
    inputs = make_inputs(case, (4, 256), torch.float16)
    inputs[:2] = [torch.full_like(inputs[0], 3e4), torch.full_like(inputs[1], 2e4)]
    results = case.fused(inputs)
    assert all(y.isfinite().all() for y in results)
    n, gain = results[-1], inputs[-1]
    torch.testing.assert_close(n, gain.expand_as(n), rtol=0.6, atol=0.6)


def eager(case, inputs):
    """The same update from plain operators in the tensors' own dtype."""
    x, d = dict(zip(case.inputs, inputs, strict=True)), [inputs[0].shape[-1]]
    k, local, glob = case.factors, None, None
    if case.op == "post_sandwich":
        h = F.rms_norm(torch.add(x["f"], x["h"], alpha=k["alpha"]), d, x["w_out"], EPS)
    elif case.op == "pre_norm":
        h = torch.add(x["h"], x["f"], alpha=k["scale"])
    elif case.op == "branch_sandwich":
        h = x["h"] + k["scale"] * F.rms_norm(x["f"], d, x["w_branch"], EPS)
    elif case.op == "inject":
        h = k["keep"] * x["h"] + k["add"] * x["x"]
    else:
        local = k["decay"] * x["local"] + k["scale"] * x["f"]
        if case.op == "looping_update":
            h = x["h"] + k["read_global"] * x["glob"] + k["read_local"] * local
        else:
            glob = k["decay"] * x["glob"] + k["read_local"] * local
            h = x["h"] + k["read_local"] * local + k["read_global"] * glob
    n = F.rms_norm(h, d, x["w_next"], EPS)
    return [y for y in (h, local, glob, n) if y is not None]


@every_op
def test_bfloat16_is_no_worse_than_eager_bfloat16(case):
    inputs = make_inputs(case, (64, 256), torch.bfloat16)
    gradients = make_gradients(case, inputs)
    exact = run(case.reference, double(inputs), double(gradients))
    ours = run(case.fused, inputs, gradients)
    theirs = run(lambda xs: eager(case, xs), inputs, gradients)
    for a, b, e in zip(*map(itertools.chain.from_iterable, (ours, theirs, exact)), strict=True):
        # Equal roundings can fall either way; a lost digit would be a factor of 2 and more.
        assert (a.double() - e).norm() <= 1.05 * (b.double() - e).norm()


@every_op
def test_n_comes_from_the_unrounded_h(case):
    """n is the exact one rounded once: a rounded h' on the way would move a third of it."""
    inputs = make_inputs(case, (64, 256), torch.bfloat16)
    n, exact = case.fused(inputs)[-1], case.reference(double(inputs))[-1]
    assert (n != exact.bfloat16()).double().mean() < 0.01


# ---------------------------------------------------------------------------
# Bad input


@every_op
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: torch.randn(2, 5)}, r"(f|x) has shape \[2, 5\]; allowed: the shape of h, \[2, 4\]"),
        ({1: torch.randn(4)}, r"(f|x) has shape \[4\]; allowed: the shape of h"),
        ({0: torch.randn(())}, r"h has shape \[\]; allowed: \[..., d\] with d at least 1"),
        ({0: torch.ones(2, 4).long()}, r"h has dtype torch.int64; allowed: float16, bfloat16"),
        ({1: torch.ones(2, 4, device="meta")}, r"(f|x) is on meta; allowed: the device of h, cpu"),
        ({-1: torch.randn(1, 4)}, r"w_next has shape \[1, 4\]; allowed: \[4\] or None"),
        ({-1: torch.ones(4).int()}, r"w_next has dtype torch.int32; allowed: float16"),
        ({-1: torch.ones(4, device="meta")}, r"w_next is on meta; allowed: the device"),
        ({"eps": -1.0}, r"eps is -1.0; allowed: a finite number, 0 or more"),
        ({"eps": float("nan")}, r"eps is nan; allowed"),
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


@every_op
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_factors_must_be_finite(case, value):
    inputs = make_inputs(case, (2, 4), torch.float32)
    for name in case.factors:
        message = f"^{case.op}: {name} is {value}; allowed: a finite number"
        with pytest.raises(InputError, match=message):
            case.fused(inputs, **{name: float(value)})
