"""The Triton kernels of the router and the combine against the dense float64 ones."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
from moe_cases import (
    combine_inputs,
    compare_combine,
    compare_router,
    router_inputs,
    run_combine,
    run_router,
)

from deeploop.kernels import _launch, expert_combine, sigmoid_router
from deeploop.kernels._launch import tl
from deeploop.kernels.triton import sigmoid_router as router_kernels

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
COMBINE = {
    torch.float32: {"rtol": 1e-5, "atol": 3e-5},
    torch.float16: {"rtol": 4e-3, "atol": 1e-2},
    # The interpreter truncates on the way to bfloat16: one unit in the last place.
    torch.bfloat16: {"rtol": 2**-7, "atol": 6e-2},
}
ROUTER_DX = {torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 2**-6}
GUARD, UNWRITTEN, PAD = 12288.0, -20480.0, 64  # both exact in every dtype


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """Every float a launch fills sits between guard values, and is written everywhere."""
    launched = []
    run_launch = _launch.Launch.run

    def run(self, like):
        launched.append(self.kernel)
        inside = {}
        given = ("routed_ptr", "weights_ptr") if "routed_ptr" in self.args else ()
        for name, value in self.args.items():
            fresh = isinstance(value, torch.Tensor) and value.numel() and value.isnan().all()
            if fresh and name not in given:
                buffer = torch.full((value.numel() + 2 * PAD,), GUARD, dtype=value.dtype)
                inside[name] = (buffer, buffer[PAD:-PAD].view(value.shape))
                inside[name][1].fill_(UNWRITTEN)
        run_launch(self._replace(args=self.args | {k: v for k, (_, v) in inside.items()}), like)
        for name, (buffer, value) in inside.items():
            assert (buffer[:PAD] == GUARD).all() and (buffer[-PAD:] == GUARD).all(), name
            assert name == "drouted_ptr" or (value != UNWRITTEN).all(), f"{name} has gaps"
            self.args[name].copy_(value)

    monkeypatch.setattr(_launch.Launch, "run", run)
    yield launched
    assert launched, "the PyTorch path ran instead of a kernel"


# ---------------------------------------------------------------------------
# Router


@pytest.mark.parametrize("experts", [1, 3, 30, 100, 256, 300])
def test_router(experts):
    for top_k in sorted({k for k in (1, 6, min(experts, 64)) if k <= experts}):
        for tokens, d in ((0, 8), (1, 1), (5, 130), (129, 24)):
            if tokens < 100 or (experts < 100 and top_k < 30):
                compare_router(sigmoid_router, router_inputs(tokens, d, experts), top_k, **CLOSE)


@pytest.mark.parametrize("dtype", ROUTER_DX, ids=str)
@pytest.mark.parametrize("experts", [30, 256])
def test_router_dtypes(dtype, experts):
    inputs = router_inputs(70, 96, experts, dtype)
    compare_router(sigmoid_router, inputs, 6, dx_tolerance=ROUTER_DX[dtype], **CLOSE)


@pytest.mark.parametrize("experts", [8, 256])
@pytest.mark.parametrize("used", [(1, 1), (1, 0), (0, 1)], ids=str)
def test_router_every_subset_of_gradients(experts, used):
    inputs = router_inputs(9, 12, experts)
    gradients = [torch.randn(9, 3), torch.tensor(0.3)]
    gradients = [g if u else None for g, u in zip(gradients, used, strict=True)]
    for needs in ((True, True), (True, False), (False, True)):
        compare_router(sigmoid_router, inputs, 3, gradients, needs, **CLOSE)
    compare_router(sigmoid_router, (*inputs[:2], None), 3, gradients, **CLOSE)


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize("experts", [3, 30, 256])
def test_router_ties_infinities_and_nan(experts):
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
def test_router_huge_logits(size):
    x = torch.full((3, 1), size, requires_grad=True)
    w = torch.tensor([[1.0], [0.5], [-1.0]], requires_grad=True)
    weights, _, _, z = sigmoid_router(x, w, None, 2)
    (weights.square().sum() + z).backward()
    assert all(t.isfinite().all() for t in (weights, z, x.grad, w.grad))


def test_router_strides_same_bits_and_gradients_left_alone():
    x, w, bias = router_inputs(70, 12, 8)
    inputs = (x.T.contiguous().T, w.T.contiguous().T, bias[:1].expand(8))
    gradients = [torch.randn(3, 70).T, torch.ones(())]
    before = [g.clone() for g in gradients]
    compare_router(sigmoid_router, inputs, 3, gradients, **CLOSE)
    first, second = (run_router(sigmoid_router, inputs, 3, gradients) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))


@_launch.jit()
def _functions_kernel(x_ptr, exp_ptr, sigmoid_ptr, slope_ptr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b_x = tl.load(x_ptr + o)
    b_sigmoid, b_slope = router_kernels._sigmoid(b_x)
    tl.store(exp_ptr + o, router_kernels._exp(-tl.abs(b_x)))
    tl.store(sigmoid_ptr + o, b_sigmoid)
    tl.store(slope_ptr + o, b_slope)


def test_router_sigmoid_is_right_to_the_last_places():
    x = np.concatenate([np.linspace(-110, 110, 8190), [-np.inf, np.inf]]).astype(np.float32)
    found = [torch.zeros(8192) for _ in range(3)]
    args = dict(zip(("exp_ptr", "sigmoid_ptr", "slope_ptr"), found, strict=True))
    config = _launch.LaunchConfig(8192, 1, 4)
    launch = _launch.Launch(_functions_kernel, 1, {"x_ptr": torch.tensor(x), "BLOCK": 8192}, config)
    launch._replace(args=launch.args | args).run(found[0])
    e = np.exp(-np.abs(x.astype(np.float64)))
    exact = (e, np.where(x >= 0, 1, e) / (1 + e), e / (1 + e) ** 2)
    for name, f, t, units in zip(args, found, exact, (1, 2, 4), strict=True):
        spacing = np.spacing(np.maximum(t.astype(np.float32), np.float32(1e-45)))
        worst = (np.abs(f.double().numpy() - t) / spacing).max()
        assert worst <= units, f"{name}: {worst:.2f} units in the last place"


# ---------------------------------------------------------------------------
# Combine


@pytest.mark.parametrize("dtype", COMBINE, ids=str)
@pytest.mark.parametrize("d", [1, 7, 96, 1000, 2050])
def test_combine(dtype, d):
    for tokens, k in ((0, 2), (1, 1), (5, 6), (3, 16)):
        compare_combine(expert_combine, combine_inputs(tokens, d, k, dtype), **COMBINE[dtype])


@pytest.mark.parametrize("d", [24, 2050])
def test_combine_another_eps(d):
    compare_combine(expert_combine, combine_inputs(3, d, 2), eps=0.5, **COMBINE[torch.float32])


def test_combine_many_tokens():
    compare_combine(expert_combine, combine_inputs(129, 24, 2), **COMBINE[torch.float32])


@pytest.mark.parametrize("d", [5000, 9000, 16384])
def test_combine_wide_rows(d):
    """Chunks that do not divide the row, and rows shared by two and four programs."""
    compare_combine(expert_combine, combine_inputs(3, d, 2), **COMBINE[torch.float32])


@pytest.mark.parametrize("d", [24, 2050])
@pytest.mark.parametrize("missing", [(), (4,), (5,), (6,), (4, 5, 6)], ids=str)
@pytest.mark.parametrize("norm", [True, False])
def test_combine_missing_inputs(d, missing, norm):
    inputs = combine_inputs(3, d, 2)
    for i in missing if norm else (*missing, 6):
        inputs[i] = None
    compare_combine(expert_combine, inputs, norm=norm, **COMBINE[torch.float32])


@pytest.mark.parametrize("d", [24, 2050])
def test_combine_every_subset_of_gradients(d):
    inputs = combine_inputs(2, d, 2)
    for used in ((1, 1), (1, 0), (0, 1)):
        for needs in itertools.product((False, True), repeat=6):
            if sum(needs) == 1 or (d < 100 and sum(needs) in (2, 5)):
                compare_combine(expert_combine, inputs, used, needs, **COMBINE[torch.float32])


@pytest.mark.parametrize("d", [24, 2050])
def test_combine_dropped_slots(d):
    inputs = combine_inputs(4, d, 2, drop=1.0)
    inputs[3].fill_(float("nan"))
    clean = [*inputs[:3], torch.ones(4, 2), *inputs[4:]]
    compare_combine(expert_combine, clean, **COMBINE[torch.float32])
    gradients = [torch.randn(4, d), torch.randn(4, d)]
    found, expected = (run_combine(expert_combine, x, gradients) for x in (inputs, clean))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    inputs[1], inputs[4] = inputs[1][:0], None
    h_new, _ = expert_combine(*inputs, 0.7)
    assert torch.equal(h_new, inputs[0])


def test_combine_strides_same_bits_and_gradients_left_alone():
    inputs = combine_inputs(5, 24, 3, drop=0.0, spare=0)
    inputs = [x if x.dim() == 1 else x.T.contiguous().T for x in inputs]
    inputs[2] = inputs[2].long()
    compare_combine(expert_combine, inputs, **COMBINE[torch.float32])
    gradients = [torch.randn(24, 5).T, torch.ones(()).expand(5, 24)]
    before = [g.clone() for g in gradients]
    first, second = (run_combine(expert_combine, inputs, gradients) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, before, strict=True))


SCRIPT = """
import numpy as np
import torch
from deeploop.kernels.triton import expert_combine as kernels

d, rows = 64, 2**25 + 8  # the last rows start past 2^31
routed = torch.from_numpy(np.zeros((rows, d), dtype=np.float16))
slots = torch.tensor([[rows - 1, 3], [rows - 3, -1]])
routed[slots[slots >= 0]] = torch.randn(3, d).half()
h, weights = torch.randn(2, d).half(), torch.tensor([[0.5, 2.0], [1.0, 1.0]])
inputs = (routed, slots, weights, None, None, None)
(h_new, _, r1, _), launch = kernels.forward_launch(h, *inputs, 1.0, 1e-6, False)
launch.run(h)
y = torch.stack([0.5 * routed[-1].double() + 2 * routed[3].double(), routed[-3].double()])
z = y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt()
torch.testing.assert_close(h_new.double(), h.double() + z, rtol=2e-3, atol=2e-3)
needs = [False, True, True, False, False, False]
args = (h, None, *inputs, None, r1, None, 1.0, h.dtype, needs)
(_, drouted, dweights, *_), launches = kernels.backward_launches(*args)
launches[0].run(h)
g = h.double()
dy = (g - z * (g * z).mean(1, keepdim=True)) / (y.square().mean(1, keepdim=True) + 1e-6).sqrt()
close = dict(rtol=2e-3, atol=2e-3)
torch.testing.assert_close(drouted[-1].double(), 0.5 * dy[0], **close)
torch.testing.assert_close(drouted[-3].double(), dy[1], **close)
torch.testing.assert_close(drouted[3].double(), 2 * dy[0], **close)
torch.testing.assert_close(dweights[0, 1, 0].double(), (dy[1] * routed[-3].double()).sum(), **close)
"""


def test_combine_offsets_past_two_to_the_31(guarded):
    guarded.append(None)  # its launches are another process's
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr[-2000:]}"
