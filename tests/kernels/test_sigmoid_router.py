"""The router on CPU: choice, values and gradients against float64, and the contract."""

import itertools
import threading
import time

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from deeploop.kernels import reference, sigmoid_router
from deeploop.utils.errors import InputError
from tests.helpers.kernel_modules import operator
from tests.helpers.moe_cases import (
    TINY_SCORES,
    check_tiny_scores,
    compare_router,
    dense_router,
    router_inputs,
    run_router,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("experts", [1, 3, 8, 30, 64, 100, 256])
def test_matches_the_dense_router(experts):
    for top_k in sorted({k for k in (1, 2, 6, 16, experts) if k <= experts}):
        for tokens in (0, 1, 5, 129 if top_k < 64 else 9):
            compare_router(sigmoid_router, router_inputs(tokens, 24, experts), top_k, **CLOSE)


@pytest.mark.parametrize(
    ("dtype", "dx"), [(torch.float64, 0), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)]
)
def test_dtypes(dtype, dx):
    tolerance = EXACT if dtype == torch.float64 else CLOSE
    compare_router(
        sigmoid_router, router_inputs(17, 40, 30, dtype), 6, dx_tolerance=dx, **tolerance
    )


def test_no_bias_and_more_dimensions():
    x, w, _ = router_inputs(12, 10, 8)
    compare_router(sigmoid_router, (x, w, None), 3, **CLOSE)
    flat = sigmoid_router(x, w, None, 3)
    shaped = sigmoid_router(x.view(2, 3, 2, 10), w, None, 3)
    assert all(torch.equal(a, b) for a, b in zip(flat, shaped, strict=True))


@pytest.mark.parametrize("router", [sigmoid_router, reference.sigmoid_router])
def test_gradcheck(router):
    x, w, bias = router_inputs(5, 4, 6, torch.float64)
    inputs = [x.requires_grad_(), w.requires_grad_()]
    assert torch.autograd.gradcheck(lambda x, w: router(x, w, bias, 3)[::3], inputs)


def test_reference_is_the_dense_router():
    compare_router(reference.sigmoid_router, router_inputs(9, 12, 30, torch.float64), 6, **EXACT)


@pytest.mark.parametrize("used", [(1, 1), (1, 0), (0, 1)], ids=str)
def test_every_subset_of_gradients(used):
    inputs = router_inputs(9, 12, 8, torch.float64)
    gradients = [torch.randn(9, 3).double(), torch.tensor(0.3).double()]
    gradients = [g if u else None for g, u in zip(gradients, used, strict=True)]
    for needs in itertools.product((False, True), repeat=2):
        if any(needs):
            compare_router(sigmoid_router, inputs, 3, gradients, needs, **EXACT)


def test_bias_gets_no_gradient():
    x, w, bias = router_inputs(5, 4, 6)
    weights, _, _, z = sigmoid_router(x, w.requires_grad_(), bias.requires_grad_(), 2)
    (weights.square().sum() + z).backward()
    assert bias.grad is None and w.grad is not None


def test_nothing_is_saved_for_a_gradient_nobody_asks_for():
    x, w, bias = router_inputs(5, 4, 6)
    for save, n_rows in ((True, 5), (False, 0)):
        logits = operator("sigmoid_router")(x, w, bias, 2, save)[-1]
        assert logits.shape == (n_rows, 6)


# ---------------------------------------------------------------------------
# The choice


@pytest.mark.parametrize("router", [sigmoid_router, reference.sigmoid_router])
@pytest.mark.parametrize("experts", [3, 30, 256])
def test_equal_scores_go_to_the_lower_expert(router, experts):
    w = torch.zeros(experts, 4)
    weights, indices, _, _ = router(torch.randn(7, 4), w, None, 3)
    assert indices.tolist() == [[0, 1, 2]] * 7
    torch.testing.assert_close(weights, torch.full((7, 3), 1 / 3))
    bias = torch.zeros(experts)
    bias[1:3] = 1
    assert router(torch.randn(7, 4), w, bias, 3)[1].tolist() == [[1, 2, 0]] * 7


def test_bias_steers_the_choice_and_not_the_weights():
    x, w, _ = router_inputs(50, 8, 6)
    bias = torch.tensor([0.0, 0, 0, 0, 0, 9])
    weights, indices, load, z = sigmoid_router(x, w, bias, 2)
    plain, before, _, z_plain = sigmoid_router(x, w, None, 2)
    assert (indices[:, 0] == 5).all() and load[5] == 50
    assert torch.equal(indices[:, 1].clamp(max=4) == indices[:, 1], torch.ones(50).bool())
    score = (x @ w.T).sigmoid().gather(1, indices.long())
    torch.testing.assert_close(weights, score / score.sum(1, keepdim=True))
    same = (before.sort(1).values == indices.sort(1).values).all(1)
    torch.testing.assert_close(weights[same].sort(1).values, plain[same].sort(1).values)
    assert torch.equal(z, z_plain)


@pytest.mark.parametrize("router", [sigmoid_router, reference.sigmoid_router])
def test_a_bias_of_minus_infinity_takes_an_expert_out(router):
    x, w, _ = router_inputs(50, 8, 6)
    bias = torch.zeros(6)
    bias[2] = -torch.inf
    assert router(x, w, bias, 5)[2].tolist() == [50, 50, 0, 50, 50, 50]


@pytest.mark.parametrize("router", [sigmoid_router, reference.sigmoid_router])
def test_nan_is_routed_the_same_way_every_time(router):
    x, w, bias = router_inputs(4, 8, 6)
    bias[3] = torch.nan
    x[1] = torch.nan
    _, indices, load, _ = router(x, w, bias, 3)
    assert indices[1].tolist() == [0, 1, 2]
    assert all(row[0] == 3 and len(set(row)) == 3 for row in indices[[0, 2, 3]].tolist())
    assert load.sum() == 12


@pytest.mark.parametrize("size", [1e4, -1e4, 90.0, -90.0])
def test_huge_logits_stay_finite(size):
    x = torch.full((3, 1), size, requires_grad=True)
    w = torch.tensor([[1.0], [0.5], [-1.0]], requires_grad=True)
    weights, _, _, z = sigmoid_router(x, w, None, 2)
    (weights.square().sum() + z).backward()
    assert all(t.isfinite().all() for t in (weights, z, x.grad, w.grad))


ROUTERS = [sigmoid_router, reference.sigmoid_router]


@pytest.mark.parametrize("router", ROUTERS, ids=["op", "reference"])
@pytest.mark.parametrize("logits", TINY_SCORES, ids=str)
def test_weights_add_up_to_one_for_any_finite_logits(router, logits):
    """Also where every chosen score is too small for a float32."""
    check_tiny_scores(router, logits)


@pytest.mark.parametrize("router", ROUTERS, ids=["op", "reference"])
@pytest.mark.parametrize("size", [-25.0, -200.0])
def test_gradcheck_of_tiny_scores(router, size):
    x = torch.full((2, 1), size, dtype=torch.float64, requires_grad=True)
    w = torch.tensor([[1.0], [1.01], [0.99], [1.02]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: router(x, w, None, 3)[0], [x, w])


# ---------------------------------------------------------------------------
# float32 whatever the process does


def test_autocast_does_not_reach_the_router():
    inputs = router_inputs(64, 96, 30)
    gradients = [torch.randn(64, 6), torch.tensor(0.3)]
    plain = run_router(sigmoid_router, inputs, 6, gradients)
    with torch.autocast("cpu", torch.bfloat16):
        under = run_router(sigmoid_router, inputs, 6, gradients)
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_fast_matrix_products_do_not_reach_the_router(precision):
    x, w, bias = router_inputs(512, 512, 64)
    expected = sigmoid_router(x, w, bias, 6)
    try:
        torch.set_float32_matmul_precision(precision)
        actual = sigmoid_router(x, w, bias, 6)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_the_precision_of_other_threads_is_left_alone():
    """The switch belongs to the process: no thread may see it move during a call."""
    x, w, bias = router_inputs(512, 256, 64)
    x.requires_grad_()
    switch, seen = torch.backends.mkldnn.matmul, set()

    def route():
        for _ in range(10):
            weights, _, _, z = sigmoid_router(x, w, bias, 6)
            (weights.square().sum() + z).backward()

    before = switch.fp32_precision
    try:
        torch.set_float32_matmul_precision("medium")
        thread = threading.Thread(target=route)
        thread.start()
        while thread.is_alive():
            seen.add(switch.fp32_precision)
            time.sleep(0)
    finally:
        torch.set_float32_matmul_precision("highest")
        switch.fp32_precision = before
    assert seen == {"bf16"}


def test_three_bfloat16_parts_hold_a_float32():
    """The tensor cores multiply three parts: w exactly, with products that lose below 2^-26."""
    parts, rest = [], torch.randn(100_000)
    a = rest.double()
    for _ in range(3):
        parts.append(rest.bfloat16().float())
        rest = rest - parts[-1]
    assert not rest.any()
    high, middle, low = (p.double() for p in parts)
    b = a.roll(1)
    high_b, middle_b, low_b = (p.roll(1) for p in (high, middle, low))
    product = high * (high_b + middle_b + low_b) + middle * (high_b + middle_b) + low * high_b
    assert ((product - a * b).abs() / (a * b).abs()).max() < 2**-24


# ---------------------------------------------------------------------------
# The contract


def test_strided_and_expanded():
    x, w, bias = router_inputs(12, 10, 8, torch.float64)
    dweights = torch.randn(12, 3).double()
    one = torch.ones((), dtype=torch.float64)
    for change in (
        lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
        lambda t: t.T.contiguous().T,
        lambda t: t[:1].expand(t.shape),
    ):
        inputs = (change(x), change(w), bias[:1].expand(8))
        compare_router(sigmoid_router, inputs, 3, [change(dweights), one], **EXACT)
    compare_router(sigmoid_router, (x, w, bias), 3, [one.expand(12, 3), one], **EXACT)


def test_same_bits_twice_no_aliases_and_gradients_left_alone():
    inputs = router_inputs(40, 16, 8)
    gradients = [torch.randn(40, 3), torch.tensor(0.5)]
    before = [g.clone() for g in gradients]
    first, second = (run_router(sigmoid_router, inputs, 3, gradients) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))
    tensors = [*first, *inputs, *gradients]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(save, dtype):
    x, w, bias = router_inputs(6, 8, 5, dtype)
    x, w = (t.requires_grad_(save) for t in (x.view(2, 3, 8), w))
    forward, backward = operator("sigmoid_router"), operator("sigmoid_router_backward")
    torch.library.opcheck(forward, (x, w, bias, 2, save))
    _, indices, _, _, logits = forward(x.detach(), w.detach(), bias, 2, True)
    for dweights, dz in ((torch.randn(6, 2), None), (None, torch.tensor(1.0))):
        args = (dweights, dz, x.detach(), w.detach(), logits, indices, [True, save])
        torch.library.opcheck(backward, args)


def test_fullgraph_over_token_counts():
    """One static compile, one for any number of tokens, and no more."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sigmoid_router, backend=counter, fullgraph=True)
    for tokens in (5, 6, 9, 12):
        inputs = router_inputs(tokens, 16, 8)
        gradients = [torch.randn(tokens, 3), torch.tensor(0.5)]
        eager, traced = (run_router(fn, inputs, 3, gradients) for fn in (sigmoid_router, compiled))
        assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
    assert counter.frame_count == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w": torch.randn(3, 5)}, r"w has shape \[3, 5\]; allowed: \[experts, 4\] with 1 to 512"),
        ({"w": torch.randn(513, 4)}, r"w has shape \[513, 4\]; allowed"),
        ({"w": torch.randn(3, 4).bfloat16()}, r"w has dtype torch.bfloat16; allowed: float32"),
        ({"bias": torch.randn(4)}, r"bias has shape \[4\]; allowed: \[3\] or None"),
        ({"bias": torch.randn(3).half()}, r"bias has dtype torch.float16; allowed: float32"),
        ({"w": torch.randn(3, 4, device="meta")}, r"w is on meta; allowed: the device of x, cpu"),
        ({"top_k": 0}, r"top_k is 0; allowed: 1 to 3"),
        ({"top_k": 4}, r"top_k is 4; allowed: 1 to 3"),
        ({"x": torch.ones(2, 4).int()}, r"x has dtype torch.int32; allowed"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(changes, message):
    arguments = {"x": torch.randn(2, 4), "w": torch.randn(3, 4), "bias": None, "top_k": 2}
    with pytest.raises(InputError, match=f"^sigmoid_router: {message}"):
        sigmoid_router(**(arguments | changes))


def test_dense_router_is_what_it_says():
    """The yardstick by hand: two experts, scores 1/2 and 3/4."""
    x = torch.ones(1, 1, dtype=torch.float64)
    w = torch.tensor([[1.0], [3.0]], dtype=torch.float64).log()
    weights, indices, load, z = dense_router(x, w, None, 2)
    assert indices.tolist() == [[1, 0]] and load.tolist() == [1, 1]
    torch.testing.assert_close(weights, torch.tensor([[0.6, 0.4]], dtype=torch.float64))
    torch.testing.assert_close(z, torch.tensor(4.0, dtype=torch.float64).log().square())
