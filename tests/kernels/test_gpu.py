"""The same comparisons on a CUDA device."""

import pytest
import torch
from kernel_cases import OPS, compare, make_gradients, make_inputs, run, subsets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 8e-2},  # sums over 129 rows, rounded to bfloat16
    torch.float16: {"rtol": 3e-3, "atol": 1e-2},
}


@pytest.fixture(autouse=True)
def on_device():
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


@every_op
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("d", [1, 7, 64, 96, 768, 1000, 4096, 5000, 8192, 16384, 20000])
@pytest.mark.parametrize("n_rows", [0, 1, 129])
def test_matches_reference(op, dtype, d, n_rows):
    inputs = make_inputs(op, (n_rows, d), dtype, torch.float32)
    compare(op, inputs, make_gradients(inputs), **TOLERANCE[dtype])


@every_op
@pytest.mark.parametrize("d", [96, 4096])
def test_every_subset_of_gradients(op, d):
    inputs = make_inputs(op, (65, d), torch.float32)
    for used in ((1, 1), (1, 0), (0, 1)):
        gradients = [g if u else None for g, u in zip(make_gradients(inputs), used, strict=True)]
        for needs in subsets(op):
            compare(op, inputs, gradients, needs, **TOLERANCE[torch.float32])


@every_op
@pytest.mark.parametrize("d", [96, 4096, 16384])
def test_same_bits_twice(op, d):
    inputs = make_inputs(op, (4099, d), torch.bfloat16, torch.float32)
    gradients = make_gradients(inputs)
    first, second = (run(op.fused, op, inputs, gradients) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_op
@pytest.mark.parametrize("d", [96, 20000])
def test_autocast_changes_nothing(op, d):
    """Neither for the kernels nor for the PyTorch path of wider rows."""
    inputs = make_inputs(op, (65, d), torch.float32)
    inputs[1] = inputs[1].bfloat16()
    gradients = make_gradients(inputs)
    plain = run(op.fused, op, inputs, gradients)
    with torch.autocast("cuda", torch.bfloat16):
        under = run(op.fused, op, inputs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


@every_op
def test_every_device_is_launched_on(op):
    """The tensors' device counts, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.device("cuda:1"), torch.cuda.device(0):
        inputs = make_inputs(op, (5, 96), torch.float32)
        compare(op, inputs, make_gradients(inputs), **TOLERANCE[torch.float32])


@every_op
def test_offsets_past_two_to_the_31(op):
    n_rows, d = (1 << 31) // 16384 + 8, 16384
    if torch.cuda.mem_get_info()[0] < 12 * n_rows * d:
        pytest.skip("needs 24 GiB of free device memory")
    inputs = make_inputs(op, (1, d), torch.bfloat16)
    h, f = (x.expand(n_rows, d).contiguous() for x in inputs[:2])
    outputs = op.fused(h, f, *inputs[2:], op.factor)
    for y in outputs:
        assert torch.equal(y[-1], y[0])
