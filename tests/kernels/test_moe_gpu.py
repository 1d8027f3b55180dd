"""The router and the combine on a CUDA device."""

import pytest
import torch

from deeploop.kernels import expert_combine, sigmoid_router
from tests.helpers.kernel_modules import operator
from tests.helpers.moe_cases import (
    combine_inputs,
    compare_combine,
    compare_router,
    router_inputs,
    run_combine,
    run_router,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COMBINE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 6e-2},
    torch.float16: {"rtol": 3e-3, "atol": 1e-2},
}
ROUTER_DX = {torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def on_device():
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("dtype", ROUTER_DX, ids=str)
@pytest.mark.parametrize("experts", [1, 8, 30, 64, 100, 256, 512])
def test_router(experts, dtype):
    for tokens, d, top_k in ((0, 8, 1), (1, 7, 1), (33, 96, min(experts, 6))):
        inputs = router_inputs(tokens, d, experts, dtype)
        compare_router(
            sigmoid_router, inputs, top_k, dx_tolerance=ROUTER_DX[dtype], rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [512, 4096])
def test_logits_have_float32_accuracy(dtype, d):
    """Against float64: no worse than twice a float32 product, TF32 allowed or not."""
    x, w, bias = router_inputs(2048, d, 30, dtype)
    exact = x.double() @ w.double().T
    theirs = (x.float() @ w.T - exact.float()).abs().max()
    torch.set_float32_matmul_precision("high")
    try:
        logits = operator("sigmoid_router")(x, w, bias, 6, True)[-1]
    finally:
        torch.set_float32_matmul_precision("highest")
    ours = (logits.double() - exact).abs().max()
    assert ours <= 2 * theirs + 1e-6, f"{ours:.2e} against {theirs:.2e}"


def test_router_ties_and_nan():
    x, w = torch.randn(70, 64), torch.zeros(30, 64)
    assert sigmoid_router(x, w, None, 3)[1].tolist() == [[0, 1, 2]] * 70
    x[1] = torch.nan
    assert sigmoid_router(x, w, None, 3)[1][1].tolist() == [0, 1, 2]


def test_router_chooses_as_on_cpu():
    inputs = router_inputs(4096, 512, 30, torch.bfloat16)
    _, indices, load, z = sigmoid_router(*inputs, 6)
    cpu = sigmoid_router(*(t.cpu() for t in inputs), 6)
    assert (indices.cpu() == cpu[1]).all(1).float().mean() > 0.999  # but for near-ties
    assert load.sum() == 4096 * 6
    torch.testing.assert_close(z.cpu(), cpu[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", COMBINE, ids=str)
@pytest.mark.parametrize("d", [1, 7, 96, 1000, 2050, 8192, 16384, 20000])
def test_combine(dtype, d):
    for tokens, k in ((0, 2), (1, 1), (33, 6), (5, 16)):
        compare_combine(expert_combine, combine_inputs(tokens, d, k, dtype), **COMBINE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_twice(dtype):
    inputs = router_inputs(4099, 512, 30, dtype)
    gradients = [torch.randn(4099, 6), torch.tensor(0.3)]
    first, second = (run_router(sigmoid_router, inputs, 6, gradients) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    inputs = combine_inputs(4099, 512, 6, dtype)
    gradients = [torch.randn(4099, 512).to(dtype) for _ in range(2)]
    first, second = (run_combine(expert_combine, inputs, gradients) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("d", [96, 20000])
def test_autocast_does_not_change_the_combine(d):
    """Neither for the kernels nor for the PyTorch path of wider rows."""
    inputs = combine_inputs(16, d, 2)
    gradients = [torch.randn(16, d), torch.randn(16, d)]
    plain = run_combine(expert_combine, inputs, gradients)
    with torch.autocast("cuda", torch.bfloat16):
        under = run_combine(expert_combine, inputs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


def test_every_device_is_launched_on():
    """The tensors' device counts, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.device("cuda:1"), torch.cuda.device(0):
        compare_router(sigmoid_router, router_inputs(5, 96, 8), 2, rtol=2e-5, atol=2e-5)
        compare_combine(expert_combine, combine_inputs(5, 96, 2), **COMBINE[torch.float32])
