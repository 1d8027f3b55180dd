"""The Triton kernels against the float64 reference, through autograd."""

import importlib

import pytest
import torch
from kernel_cases import EPS, OPS, compare, make_gradients, make_inputs, run, subsets

pytestmark = pytest.mark.usefixtures("kernels_run")
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 3e-5},
    torch.float16: {"rtol": 4e-3, "atol": 1e-2},
    # The interpreter truncates on the way to bfloat16: one unit in the last place.
    torch.bfloat16: {"rtol": 2**-7, "atol": 6e-2},
}


@every_op
@pytest.mark.parametrize("d", [1, 7, 64, 96, 768, 1000, 4096])
@pytest.mark.parametrize("n_rows", [0, 1, 3, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_matches_reference(op, d, n_rows, dtype):
    inputs = make_inputs(op, (n_rows, d), dtype)
    compare(op, inputs, make_gradients(inputs), **TOLERANCE[dtype])


@every_op
@pytest.mark.parametrize("d", [96, 2050])
def test_another_eps(op, d):
    inputs = make_inputs(op, (3, d), torch.float32)
    compare(op, inputs, make_gradients(inputs), eps=0.5, **TOLERANCE[torch.float32])


@every_op
@pytest.mark.parametrize("d", [2050, 5000, 9000, 16384])
def test_wide_rows(op, d):
    """Chunks that do not divide the row, and rows shared by two programs."""
    inputs = make_inputs(op, (5, d), torch.float32)
    compare(op, inputs, make_gradients(inputs), **TOLERANCE[torch.float32])


@every_op
@pytest.mark.parametrize("d", [96, 4096])
def test_bfloat16(op, d):
    inputs = make_inputs(op, (5, d), torch.bfloat16, torch.float32)
    compare(op, inputs, make_gradients(inputs), **TOLERANCE[torch.bfloat16])


@every_op
@pytest.mark.parametrize("d", [96, 2050])
@pytest.mark.parametrize("used", [(1, 1), (1, 0), (0, 1)], ids=str)
def test_every_subset_of_gradients(op, d, used):
    inputs = make_inputs(op, (3, d), torch.float32)
    gradients = [g if u else None for g, u in zip(make_gradients(inputs), used, strict=True)]
    for needs in subsets(op):
        compare(op, inputs, gradients, needs, **TOLERANCE[torch.float32])


@every_op
@pytest.mark.parametrize("d", [96, 2050])
@pytest.mark.parametrize("which", [1, 2, 3])
def test_missing_gains(op, d, which):
    inputs = make_inputs(op, (3, d), torch.float32)
    for i in range(len(op.inputs) - 2):
        if which >> i & 1:
            inputs[2 + i] = None
    compare(op, inputs, make_gradients(inputs), **TOLERANCE[torch.float32])


@every_op
def test_strided_and_expanded(op):
    inputs = make_inputs(op, (2, 3, 20), torch.float32)
    gradients = make_gradients(inputs)
    for change in (
        lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: x[:1].expand(x.shape),
        lambda x: x.flatten()[:1].expand(x.shape),
    ):
        compare(op, [*map(change, inputs)], [*map(change, gradients)], **TOLERANCE[torch.float32])
    one = torch.ones(()).expand(2, 3, 20)
    compare(op, inputs, [one, one], **TOLERANCE[torch.float32])


@every_op
@pytest.mark.parametrize("d", [96, 4096])
def test_same_bits_twice_and_gradients_left_alone(op, d):
    inputs = make_inputs(op, (37, d), torch.float32)
    gradients = make_gradients(inputs)
    before = [g.clone() for g in gradients]
    first, second = (run(op.fused, op, inputs, gradients) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(g, b) for g, b in zip(gradients, before, strict=True))


@every_op
@pytest.mark.parametrize("d", [7, 96, 1000, 2050, 9000])
@pytest.mark.parametrize("n_rows", [1, 5, 19])
def test_no_write_out_of_bounds(op, d, n_rows, guard):
    inputs = make_inputs(op, (n_rows, d), torch.float32)
    gradients = make_gradients(inputs)
    buffers = guard()
    compare(op, inputs, gradients, **TOLERANCE[torch.float32])
    assert len(buffers) == 4 + len(op.inputs) + (op.name == "post_sandwich") - 1


@every_op
def test_programs_share_the_rows(op):
    """Fewer programs than rows, and more rows than a multiple of either."""
    module = importlib.import_module(f"deeploop.kernels.{op.name}")
    x = torch.zeros(131, 1000)
    launch = module.aot_launches(x, torch.ones(1000))[f"{op.name} backward"]
    assert 1 < launch.grid < 131 and 131 % launch.grid
    launch.run(x)


def test_float64_takes_the_exact_path(kernels_run):
    op = OPS[0]
    inputs = make_inputs(op, (3, 5), torch.float64)
    compare(op, inputs, make_gradients(inputs), rtol=1e-11, atol=1e-11)
    assert not kernels_run
    x = torch.randn(1, 4)
    op.fused(x, x, None, None, 1.0, EPS)
