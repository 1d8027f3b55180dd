"""The combine on CPU: values and gradients against float64, and the contract."""

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from deeploop import kernels
from deeploop.kernels import expert_combine, reference
from deeploop.utils.errors import InputError
from tests.helpers.kernel_cases import LAYOUTS
from tests.helpers.kernel_modules import operator
from tests.helpers.moe_cases import (
    EPS,
    FLOATS,
    combine_inputs,
    compare_combine,
    compare_combine_overflow,
    run_combine,
)

TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-5, "atol": 3e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 6e-2},
    torch.float16: {"rtol": 3e-3, "atol": 8e-3},
}
EXACT = TOLERANCE[torch.float64]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("k", [1, 2, 6, 16])
def test_matches_the_dense_combine(dtype, k):
    for tokens, d in ((0, 8), (1, 1), (5, 7), (33, 64)):
        compare_combine(expert_combine, combine_inputs(tokens, d, k, dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("combine", [expert_combine, reference.expert_combine])
@pytest.mark.parametrize("missing", [*itertools.product((False, True), repeat=3)], ids=str)
@pytest.mark.parametrize("norm", [True, False])
def test_missing_inputs(combine, missing, norm):
    inputs = combine_inputs(6, 10, 3, torch.float64)
    for i, gone in zip((4, 5, 6), missing, strict=True):
        if gone or (i == 6 and not norm):
            inputs[i] = None
    compare_combine(combine, inputs, norm=norm, **EXACT)


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_another_eps(eps):
    inputs = combine_inputs(5, 7, 2, torch.float64, drop=0.0)
    compare_combine(expert_combine, inputs, eps=eps, **EXACT)


@pytest.mark.parametrize("used", [(1, 1), (1, 0), (0, 1)], ids=str)
def test_every_subset_of_gradients(used):
    inputs = combine_inputs(4, 6, 2, torch.float64)
    for needs in itertools.product((False, True), repeat=6):
        if any(needs):
            compare_combine(expert_combine, inputs, used, needs, **EXACT)


@pytest.mark.parametrize("combine", [expert_combine, reference.expert_combine])
def test_gradcheck(combine):
    inputs = combine_inputs(3, 5, 2, torch.float64, spare=0)
    inputs[1] = torch.randn_like(inputs[1])
    leaves = [t.requires_grad_() if i in FLOATS else t for i, t in enumerate(inputs)]
    assert torch.autograd.gradcheck(lambda *t: combine(*t, 0.7, EPS), leaves)


@pytest.mark.parametrize("shared", [True, False])
def test_all_slots_dropped(shared):
    """y is the shared expert's output, or zero, whose norm and gradients are finite."""
    inputs = combine_inputs(4, 6, 2, drop=1.0)
    inputs[4] = inputs[4] if shared else None
    compare_combine(expert_combine, inputs, **TOLERANCE[torch.float32])
    if not shared:
        h_new, _ = expert_combine(*inputs, 0.7, EPS)
        assert torch.equal(h_new, inputs[0])
    inputs[1] = inputs[1][:0]  # no expert ran at all
    compare_combine(expert_combine, inputs, **TOLERANCE[torch.float32])


def test_weights_of_dropped_slots_do_not_matter_and_zero_weights_may_be_kept():
    inputs = combine_inputs(5, 6, 3)
    inputs[3][inputs[2] < 0] = torch.nan
    inputs[3][2] = 0
    clean = [*inputs[:3], inputs[3].nan_to_num(), *inputs[4:]]
    compare_combine(expert_combine, clean, **TOLERANCE[torch.float32])
    gradients = [torch.randn(5, 6), torch.randn(5, 6)]
    results = run_combine(expert_combine, inputs, gradients)
    assert all(t.isfinite().all() for t in results)


def test_overflow_is_that_of_eager():
    compare_combine_overflow(24)


def test_is_branch_sandwich_of_the_sum():
    inputs = combine_inputs(7, 16, 4, drop=0.0, spare=0)
    h, routed, slots, weights, shared, w_branch, w_next = inputs
    y = (weights[..., None] * routed[slots.long()]).sum(1) + shared
    expected = kernels.branch_sandwich(h, y, w_branch, w_next, 0.7, EPS)
    torch.testing.assert_close(expert_combine(*inputs, 0.7, EPS), tuple(expected))


def test_more_dimensions_and_both_index_types():
    inputs = combine_inputs(12, 10, 2, torch.float64)
    flat = expert_combine(*inputs, 0.7, EPS)
    h, routed, slots, weights, shared, *gains = inputs
    shape = (2, 3, 2, 10)
    shaped = expert_combine(
        h.view(shape), routed, slots.long(), weights, shared.view(shape), *gains, 0.7, EPS
    )
    assert all(torch.equal(a.view(shape), b) for a, b in zip(flat, shaped, strict=True))


def test_low_precision_experts_on_a_float32_stream():
    inputs = combine_inputs(8, 32, 2, torch.bfloat16)
    inputs[0] = inputs[0].float()
    compare_combine(expert_combine, inputs, **TOLERANCE[torch.bfloat16])


# ---------------------------------------------------------------------------
# The contract


@pytest.mark.parametrize("layout", ["sliced", "padded", "transposed", "expanded"])
def test_strides(layout):
    change = LAYOUTS[layout]
    inputs = combine_inputs(6, 10, 3, torch.float64, drop=0.0, spare=0)
    if layout == "expanded":  # no row may be named twice
        inputs = [x if i == 2 else change(x) for i, x in enumerate(inputs)]
    else:
        inputs = [change(x) for x in inputs]
    compare_combine(expert_combine, inputs, **EXACT)


def test_gradient_of_a_sum():
    inputs = combine_inputs(4, 10, 2, torch.float64)
    one = torch.ones((), dtype=torch.float64)
    expanded = run_combine(expert_combine, inputs, [one.expand(4, 10)] * 2)
    dense = run_combine(expert_combine, inputs, [torch.ones(4, 10).double()] * 2)
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


@pytest.mark.parametrize("norm", [True, False])
def test_same_bits_twice_no_aliases_and_gradients_left_alone(norm):
    inputs = combine_inputs(9, 16, 2)
    if not norm:
        inputs[5] = inputs[6] = None
    gradients = [torch.randn(9, 16), torch.randn(9, 16)]
    before = [g.clone() for g in gradients]
    first, second = (
        [t for t in run_combine(expert_combine, inputs, gradients, norm=norm) if t is not None]
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))
    tensors = [*first, *gradients, *(t for t in inputs if t is not None)]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


def test_autocast_changes_nothing():
    inputs = combine_inputs(16, 32, 2)
    gradients = [torch.randn(16, 32), torch.randn(16, 32)]
    plain = run_combine(expert_combine, inputs, gradients)
    with torch.autocast("cpu", torch.bfloat16):
        under = run_combine(expert_combine, inputs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


@pytest.mark.parametrize("norm", [True, False])
def test_opcheck(norm):
    inputs = combine_inputs(6, 8, 2, torch.bfloat16, spare=0, drop=0.0)
    inputs[4] = inputs[4].view(2, 3, 8)
    inputs[0] = inputs[0].view(2, 3, 8)
    numbers = torch.tensor([0.7, EPS], dtype=torch.float64)
    leaves = [t.clone().requires_grad_() if i in FLOATS else t for i, t in enumerate(inputs)]
    leaves[6] = leaves[6] if norm else None
    torch.library.opcheck(operator("expert_combine"), (*leaves, numbers, norm))
    h, *rest = inputs
    stats = torch.rand(6)
    saved = (h, stats, stats.clone()) if norm else (None, stats, None)
    grads = (torch.randn_like(h), torch.randn_like(h) if norm else None)
    needs = [True, True, False, True, True, norm]
    arguments = (*grads, *rest, *saved, numbers, h.dtype, needs)
    torch.library.opcheck(operator("expert_combine_backward"), arguments)


def test_fullgraph_without_recompiles_over_scales_and_token_counts():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(expert_combine, backend=counter, fullgraph=True)
    frames = []
    for tokens, scale in ((6, 0.7), (6, 0.9), (6, 1.1), (8, 1.3), (9, 1.5), (12, 2.0)):
        inputs = combine_inputs(tokens, 16, 2, spare=0)
        gradients = [torch.randn(tokens, 16), torch.randn(tokens, 16)]
        numbers = {"scale": scale, "eps": scale * EPS}
        eager, traced = (
            run_combine(fn, inputs, gradients, **numbers) for fn in (expert_combine, compiled)
        )
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
        frames.append(counter.frame_count)
    # The second scale makes it a symbol, the second token count that; then no more.
    assert frames[2:] == [frames[1], *[frames[3]] * 3] and frames[-1] <= 3, frames


@pytest.mark.parametrize(
    ("which", "value", "message"),
    [
        ("shared", torch.randn(2, 5), r"shared has shape \[2, 5\]; allowed: the shape of h"),
        ("routed", torch.randn(4, 5), r"routed has shape \[4, 5\]; allowed: \[rows, 4\]"),
        ("routed", torch.ones(4, 4).int(), r"routed has dtype torch.int32; allowed"),
        ("slots", torch.zeros(3, 2).int(), r"slots has shape \[3, 2\]; allowed: \[2, 2\]"),
        ("slots", torch.zeros(2, 2), r"slots has dtype torch.float32; allowed: int32, int64"),
        ("slots", torch.tensor([[0, 1], [2, 4]]), r"slots reaches 4; allowed: -1 \(dropped\) to 3"),
        ("slots", torch.tensor([[0, 1], [2, -2]]).int(), r"slots reaches -2; allowed: -1"),
        ("weights", torch.rand(3, 2), r"weights has shape \[3, 2\]; allowed: \[2, 2\]"),
        ("weights", torch.rand(2, 2).half(), r"weights has dtype torch.float16; allowed: float32"),
        ("weights", torch.rand(2, 2, device="meta"), r"weights is on meta; allowed: the device of"),
        ("w_branch", torch.rand(5), r"w_branch has shape \[5\]; allowed: \[4\] or None"),
        ("norm", False, r"w_next is given and norm is False"),
        ("eps", -1.0, r"eps is -1.0; allowed: a finite number, 0 or more"),
        ("scale", float("nan"), r"scale is nan; allowed: a finite number"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(which, value, message):
    arguments = {
        "h": torch.randn(2, 4), "routed": torch.randn(4, 4), "weights": torch.rand(2, 2),
        "slots": torch.arange(4).view(2, 2), "shared": None, "w_branch": torch.ones(4),
        "w_next": torch.ones(4), "scale": 1.0,
    }  # fmt: skip
    with pytest.raises(InputError, match=f"^expert_combine: {message}"):
        expert_combine(**(arguments | {which: value}))
