"""The Triton kernels of the router against the dense float64 one."""

import numpy as np
import pytest
import torch

from deeploop.kernels import sigmoid_router
from tests.helpers.kernel_modules import Config, Launch, jit, router_kernels, tl
from tests.helpers.moe_cases import (
    TINY_SCORES,
    check_tiny_scores,
    compare_router,
    router_inputs,
    run_router,
)

pytestmark = pytest.mark.usefixtures("launches")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
DX = {torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("experts", [1, 3, 30, 100, 256, 300])
def test_matches_the_dense_router(experts):
    some = min(experts, 6)
    most = some if experts == 256 else min(experts, 64)
    sizes = [(5, 130, k) for k in sorted({1, some, most})]
    sizes += [(0, 8, some), (1, 1, 1), (65, 24, some)]
    for tokens, d, top_k in sizes:
        compare_router(sigmoid_router, router_inputs(tokens, d, experts), top_k, **CLOSE)


@pytest.mark.parametrize("dtype", DX, ids=str)
@pytest.mark.parametrize("experts", [30, 256])
def test_dtypes(dtype, experts):
    inputs = router_inputs(70 if experts < 100 else 35, 96, experts, dtype)
    compare_router(sigmoid_router, inputs, 6, dx_tolerance=DX[dtype], **CLOSE)


@pytest.mark.parametrize("experts", [8, 256])
@pytest.mark.parametrize("used", [(1, 1), (1, 0), (0, 1)], ids=str)
def test_every_subset_of_gradients(experts, used):
    inputs = router_inputs(9, 12, experts)
    gradients = [torch.randn(9, 3), torch.tensor(0.3)]
    gradients = [g if u else None for g, u in zip(gradients, used, strict=True)]
    for needs in ((True, True), (True, False), (False, True)):
        compare_router(sigmoid_router, inputs, 3, gradients, needs, **CLOSE)
    compare_router(sigmoid_router, (*inputs[:2], None), 3, gradients, **CLOSE)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize("experts", [3, 30, 256])
def test_ties_infinities_and_nan(experts):
    x, w = torch.randn(7, 4), torch.zeros(experts, 4)
    weights, indices, load, _ = sigmoid_router(x, w, None, 3)
    assert indices.tolist() == [[0, 1, 2]] * 7 and load[:3].tolist() == [7] * 3
    torch.testing.assert_close(weights, torch.full((7, 3), 1 / 3))
    bias = torch.zeros(experts)
    bias[2] = torch.inf
    bias[0] = -torch.inf
    assert sigmoid_router(x, w, bias, 2)[1].tolist() == [[2, 1]] * 7
    bias[1] = torch.nan
    assert sigmoid_router(x, w, bias, 3)[1].tolist() == [[1, 2, 0 if experts == 3 else 3]] * 7
    x[1] = -torch.nan
    _, indices, load, _ = sigmoid_router(x, w, None, 3)
    assert indices.tolist() == [[0, 1, 2]] * 7 and load.sum() == 21


@pytest.mark.parametrize("size", [1e4, -1e4, 90.0, -90.0])
def test_huge_logits(size):
    x = torch.full((3, 1), size, requires_grad=True)
    w = torch.tensor([[1.0], [0.5], [-1.0]], requires_grad=True)
    weights, _, _, z = sigmoid_router(x, w, None, 2)
    (weights.square().sum() + z).backward()
    assert all(t.isfinite().all() for t in (weights, z, x.grad, w.grad))


@pytest.mark.parametrize("logits", TINY_SCORES, ids=str)
def test_weights_add_up_to_one_for_any_finite_logits(logits):
    check_tiny_scores(sigmoid_router, logits)


def test_strides_same_bits_and_gradients_left_alone():
    x, w, bias = router_inputs(70, 12, 8)
    inputs = (x.T.contiguous().T, w.T.contiguous().T, bias[:1].expand(8))
    gradients = [torch.randn(3, 70).T, torch.ones(())]
    before = [g.clone() for g in gradients]
    compare_router(sigmoid_router, inputs, 3, gradients, **CLOSE)
    first, second = (run_router(sigmoid_router, inputs, 3, gradients) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))


@jit()
def _functions_kernel(x_ptr, exp_ptr, sigmoid_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + o)
    tl.store(exp_ptr + o, router_kernels._exp(-tl.abs(b_x)))
    tl.store(sigmoid_ptr + o, router_kernels._sigmoid(b_x))


def test_sigmoid_is_right_to_the_last_places():
    x = np.concatenate([np.linspace(-110, 110, 8190), [-np.inf, np.inf]]).astype(np.float32)
    actual = [torch.zeros(8192) for _ in range(2)]
    args = dict(zip(("exp_ptr", "sigmoid_ptr"), actual, strict=True))
    config = Config(8192, 1, 4)
    launch = Launch(_functions_kernel, 1, {"x_ptr": torch.tensor(x), "BLOCK": 8192}, config)
    launch._replace(args=launch.args | args).run(actual[0])
    e = np.exp(-np.abs(x.astype(np.float64)))
    exact = (e, np.where(x >= 0, 1, e) / (1 + e))
    for name, f, t, units in zip(args, actual, exact, (1, 2), strict=True):
        spacing = np.spacing(np.maximum(t.astype(np.float32), np.float32(1e-45)))
        worst = (np.abs(f.double().numpy() - t) / spacing).max()
        assert worst <= units, f"{name}: {worst:.2f} units in the last place"


@jit()
def _dot_kernel(x_ptr, w_ptr, y_ptr, N: tl.constexpr, PRECISION: tl.constexpr):
    o = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    b_sum = tl.zeros((N, N), tl.float32)
    b_y = router_kernels._dot(tl.load(x_ptr + o), tl.load(w_ptr + o), b_sum, PRECISION)
    tl.store(y_ptr + o, b_y)


def test_a_bfloat16_product_takes_all_three_parts_of_a_float32(monkeypatch):
    """The product for tensor cores: one part less and it is off by 2^-17 or more."""

    def dot(b_a, b_b, b_sum=0.0):  # the interpreter's own multiplies the bits of a bfloat16
        b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
        return tl.sum(b_a[:, :, None] * b_b[None, :, :], axis=1) + b_sum

    monkeypatch.setattr(tl, "dot", dot)
    # A GPU's instruction that moves a value and changes nothing.
    monkeypatch.setattr(tl, "inline_asm_elementwise", lambda asm, constraints, args, **_: args[0])
    n = 32
    x = torch.eye(n)[torch.randperm(n)]  # so that each sum is one product
    w, y = torch.randn(n, n), torch.full((n, n), torch.nan)
    arguments = {"x_ptr": x.bfloat16(), "w_ptr": w, "y_ptr": y, "N": n, "PRECISION": "bf16x6"}
    Launch(_dot_kernel, 1, arguments, Config(n, n, 4)).run(y)
    exact = x.double() @ w.double()
    assert ((y - exact).abs() / exact.abs()).max() <= 2**-24
