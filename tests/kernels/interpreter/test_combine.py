"""The Triton kernels of the combine against the dense float64 one."""

import itertools

import pytest
import torch

from deeploop.kernels import expert_combine
from tests.helpers.moe_cases import (
    combine_inputs,
    compare_combine,
    compare_combine_overflow,
    run_combine,
)

pytestmark = pytest.mark.usefixtures("launches")
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 3e-5},
    torch.float16: {"rtol": 4e-3, "atol": 1e-2},
    # The interpreter truncates on the way to bfloat16: one unit in the last place.
    torch.bfloat16: {"rtol": 2**-7, "atol": 6e-2},
}


@pytest.mark.parametrize("d", [1, 7, 96, 1000, 2050])
def test_matches_the_dense_combine(d):
    for tokens, k in ((0, 2), (1, 1), (5, 6), *([(3, 16)] if d in (7, 1000) else [])):
        compare_combine(expert_combine, combine_inputs(tokens, d, k), **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [7, 96, 2050])
def test_low_precision(dtype, d):
    compare_combine(expert_combine, combine_inputs(2, d, 6, dtype), **TOLERANCE[dtype])


@pytest.mark.parametrize("d", [24, 2050])
def test_another_eps(d):
    compare_combine(expert_combine, combine_inputs(3, d, 2), eps=0.5, **TOLERANCE[torch.float32])


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("d", [24, 2050])
def test_overflow_is_that_of_eager(d):
    compare_combine_overflow(d)


def test_many_tokens():
    compare_combine(expert_combine, combine_inputs(129, 24, 2), **TOLERANCE[torch.float32])


@pytest.mark.parametrize("d", [5000, 9000, 16384])
def test_wide_rows(d):
    """Chunks that do not divide the row, and rows shared by two and four programs."""
    compare_combine(expert_combine, combine_inputs(2, d, 2), **TOLERANCE[torch.float32])


MISSING = [(), (4,), (5,), (6,), (4, 5, 6)]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("d", "missing"), [*((24, m) for m in MISSING), (2050, ()), (2050, (4, 5, 6))], ids=str
)
def test_missing_inputs(d, missing, norm):
    inputs = combine_inputs(3, d, 2)
    for i in missing if norm else (*missing, 6):
        inputs[i] = None
    compare_combine(expert_combine, inputs, norm=norm, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("d", [24, 2050])
def test_every_subset_of_gradients(d):
    inputs = combine_inputs(2, d, 2)
    for used in ((1, 1), (1, 0), (0, 1)):
        counts = (1, 5) if used == (1, 1) else (1,) if d < 100 else (6,)
        for needs in itertools.product((False, True), repeat=6):
            if sum(needs) in counts:
                compare_combine(expert_combine, inputs, used, needs, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("d", [24, 2050])
def test_dropped_slots(d):
    inputs = combine_inputs(4, d, 2, drop=1.0)
    inputs[3].fill_(float("nan"))
    clean = [*inputs[:3], torch.ones(4, 2), *inputs[4:]]
    compare_combine(expert_combine, clean, **TOLERANCE[torch.float32])
    gradients = [torch.randn(4, d), torch.randn(4, d)]
    actual, expected = (run_combine(expert_combine, x, gradients) for x in (inputs, clean))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    inputs[1], inputs[4] = inputs[1][:0], None
    h_new, _ = expert_combine(*inputs, 0.7)
    assert torch.equal(h_new, inputs[0])


def test_strides_same_bits_and_gradients_left_alone():
    inputs = combine_inputs(5, 24, 3, drop=0.0, spare=0)
    inputs = [x if x.dim() == 1 else x.T.contiguous().T for x in inputs]
    inputs[2] = inputs[2].long()
    compare_combine(expert_combine, inputs, **TOLERANCE[torch.float32])
    gradients = [torch.randn(24, 5).T, torch.ones(()).expand(5, 24)]
    before = [g.clone() for g in gradients]
    first, second = (run_combine(expert_combine, inputs, gradients) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))
