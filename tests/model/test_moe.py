"""Routed experts: values and gradients against every expert run on every token, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from deeploop.kernels import expert_combine, sigmoid_router
from deeploop.model.moe import experts
from deeploop.model.moe.experts import _forward
from deeploop.model.moe.layer import MoE, copy_router, drop, group, update_router_bias_
from deeploop.utils.errors import InputError
from tests.helpers.moe_layer import EPS, EXACT, dense, inputs_for, make, ours, results, swiglu


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


CASES = {
    "plain": {},
    "no shared expert": {"n_shared": 0},
    "capacity": {"capacity": 0.6},
    "every expert": {"n_experts": 4, "top_k": 4},
    "every expert, capacity": {"n_experts": 4, "top_k": 4, "capacity": 0.6},
    "one expert": {"n_experts": 1, "top_k": 1},
}


@pytest.mark.parametrize("backend", ["grouped_mm", "reference"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(3, 5, 6), (1, 6), (0, 6)], ids=str)
def test_matches_every_expert_on_every_token(backend, case, shape):
    moe, inputs = make(**CASES[case], backend=backend), inputs_for(*shape)
    actual, expected = results(ours, moe, inputs), results(dense, moe, inputs)
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("backend", ["grouped_mm", "reference"])
@pytest.mark.parametrize("starved", [False, True])
def test_all_tokens_to_one_expert_and_none_to_another(backend, starved):
    moe, inputs = make(top_k=1, backend=backend), inputs_for(9, 6)
    with torch.no_grad():
        moe.bias[3] = -9 if starved else 9
    empty = [3] if starved else [0, 1, 2, 4]
    actual, expected = results(ours, moe, inputs), results(dense, moe, inputs)
    torch.testing.assert_close(actual, expected, **EXACT)
    assert not actual[2]["gate_up"][empty].any() and not actual[2]["down"][empty].any()


@pytest.fixture
def as_on_cuda(monkeypatch):
    """One F.grouped_mm for all experts, which runs on a CPU as well.

    Its output holds NaN wherever it is free to hold anything: past the last end, and in
    the weight gradient of an expert without rows (what Blackwell leaves there).
    """
    calls, plain = [], F.grouped_mm

    def poisoned(a, b, offs):
        out = plain(a, b, offs=offs)
        calls.append((a.shape, b.shape))
        if b.dim() == 3:
            out[int(offs[-1]) :] = torch.nan
        else:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    monkeypatch.setattr(experts, "_one_gemm", lambda x: True)
    monkeypatch.setattr(F, "grouped_mm", poisoned)
    return calls


@pytest.mark.parametrize("tokens", [0, 1, 40])
@pytest.mark.parametrize("capacity", [0.0, 0.6])
def test_one_grouped_gemm_for_all_experts(as_on_cuda, tokens, capacity):
    moe = make(d=8, f=4, capacity=capacity)
    inputs = inputs_for(tokens, 8)
    with torch.no_grad():
        moe.bias[3] = -9  # an expert without rows
    expected = results(dense, moe, inputs)
    moe.float()
    actual = results(ours, moe, [x.float() for x in inputs])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, check_dtype=False)
    assert len(as_on_cuda) == (6 if tokens else 0), "two forward, two of each kind backward"
    assert not actual[2]["gate_up"][3].any() and not actual[2]["down"][3].any()


def test_every_row_and_gradient_is_written(monkeypatch):
    """Memory that was only allocated holds NaN here."""
    plain = {"like": torch.empty_like, "new": torch.Tensor.new_empty}
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(plain["like"](*a, **k)))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(plain["new"](*a, **k)))

    def poison(x):
        return x.fill_(torch.nan if x.is_floating_point() else -7)

    moe = make(top_k=1)
    with torch.no_grad():
        moe.bias[3] = -9
    outputs, inputs, parameters = results(ours, moe, inputs_for(9, 6))
    for x in (*outputs, *inputs, *(g for g in parameters.values() if g is not None)):
        assert x.isfinite().all()


def test_capacity_drops_the_lowest_weights_and_renormalises():
    indices = torch.tensor([[0, 1], [0, 2], [0, 1], [1, 0], [0, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.6, 0.4], [0.9, 0.1], [0.5, 0.5]])
    load = torch.tensor([5, 3, 2])
    groups = group(indices, load, weights)
    # Expert 0 in falling weight, equals in token order: tokens 1, 0, 2, 4, 3.
    assert groups.token.tolist() == [1, 0, 2, 4, 3, 3, 0, 2, 4, 1]
    assert groups.ends.tolist() == [5, 8, 10]
    slots, kept = drop(groups, indices, load, weights, cap=2)
    assert slots.tolist() == [[1, 6], [0, 9], [-1, -1], [5, -1], [-1, 8]]
    expected = torch.tensor([[0.6, 0.4], [0.8, 0.2], [0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    torch.testing.assert_close(kept, expected)
    assert slots.dtype == groups.token.dtype == groups.ends.dtype == torch.int32


def test_a_token_that_loses_every_slot_keeps_its_shared_experts_and_a_finite_gradient():
    moe, n = make(n_experts=2, top_k=1, capacity=0.2), torch.ones(8, 6, dtype=torch.float64)
    n.requires_grad_()
    routed = moe(n, moe.router(0))
    assert (routed.slots >= 0).sum() == 1, "all alike: the first token takes the one place"
    assert routed.weights[0] == 1 and not routed.weights[1:].any()
    h, shared = torch.zeros_like(n), routed.shared
    combined, _ = expert_combine(h, *routed[:4], None, None, 1.0, EPS)
    alone = shared / (shared.square().mean(-1, keepdim=True) + EPS).sqrt()
    torch.testing.assert_close(combined[1:], alone[1:], **EXACT)
    combined.square().sum().backward()
    assert n.grad.isfinite().all()


def test_nan_weights_stay_with_their_expert():
    indices = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    weights = torch.full((2, 2), -torch.nan)
    groups = group(indices, torch.tensor([2, 2]), weights)
    assert groups.token[:2].sort().values.tolist() == groups.token[2:].sort().values.tolist()
    assert (groups.inverse < 2).tolist() == (indices == 0).tolist()


def test_capacity_acts_in_training_alone():
    moe, n = make(capacity=0.3), torch.randn(20, 6, dtype=torch.float64)
    assert (moe(n, moe.router(0)).slots < 0).any()
    assert moe.capacity(20) == 2
    assert moe.capacity(1) == 1, "never below one slot"
    assert (moe.eval()(n, moe.router(0)).slots >= 0).all()
    assert moe.train()(n, moe.router(0)).load.sum() == 40, "the load counts dropped slots as well"


def test_each_loop_has_its_own_router_and_gradient():
    moe, n = make(), torch.randn(7, 6, dtype=torch.float64)
    for loop, owner in ((0, 0), (1, 1), (2, 2), (5, 2)):
        moe.zero_grad(set_to_none=True)
        routed = moe(n, moe.router(loop))
        expected = sigmoid_router(n, moe.routers[owner], moe.bias, moe.top_k)[0]
        torch.testing.assert_close(routed.weights, expected)
        (routed.weights.sum() + routed.z).backward()
        assert [r.grad is not None for r in moe.routers] == [i == owner for i in range(3)]


def test_routers_start_as_copies_of_the_first():
    moe = MoE(6, 5, 2, 4, 0, 3, 0.0)
    assert all(r.equal(moe.routers[0]) for r in moe.routers)
    assert len({r.data_ptr() for r in moe.routers}) == 3
    with torch.no_grad():
        moe.routers[0].normal_()
    copy_router(moe)
    assert all(r.equal(moe.routers[0]) for r in moe.routers)


def test_shared_is_the_sum_of_separate_swiglus():
    moe, n = make(n_shared=3, f=4), torch.randn(2, 5, 6, dtype=torch.float64)
    gate, up = moe.shared.gate_up.weight.chunk(2)
    alone = [
        swiglu(n, torch.cat((gate[i : i + 4], up[i : i + 4])), moe.shared.out.weight[:, i : i + 4])
        for i in (0, 4, 8)
    ]
    torch.testing.assert_close(moe(n, moe.router(0)).shared, sum(alone), **EXACT)
    none = make(n_shared=0)
    assert none(n, none.router(0)).shared is None


def test_balance_moves_each_bias_towards_the_mean_load():
    bias = torch.tensor([0.5, 0.0, 0.0, -0.5])
    update_router_bias_(bias, torch.tensor([10, 4, 5, 1]), lr=0.1)
    torch.testing.assert_close(bias, torch.tensor([0.375, 0.075, -0.025, -0.425]))
    big = torch.tensor([2**53 + 1, 2**53 - 1])
    bias = torch.zeros(2)
    update_router_bias_(bias, big, lr=1.0)
    assert bias.tolist() == [-1, 1], "loads of a whole run are compared exactly"
    assert "bias" in make().state_dict()


def test_the_bias_keeps_a_mean_of_zero_and_its_choices():
    """100,000 steps in which one expert of four is overloaded used to end at a mean of +50."""
    load, centred, drifts = torch.tensor([97, 1, 1, 1]), torch.zeros(4), torch.zeros(4)
    scores = torch.rand(50, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(1000):
        update_router_bias_(centred, load, lr=2e-3)
        update_router_bias_(drifts, load, lr=2e-3, centred=False)
        assert torch.equal(*(torch.topk(scores + b, 2).indices for b in (centred, drifts)))
    assert drifts.mean() > 0.9 and centred.mean().abs() < 1e-6
    for _ in range(20_000):
        update_router_bias_(centred, load, lr=0.5)
    assert centred.mean().abs() < 1e-2 * centred.abs().max()


@pytest.mark.parametrize("in_hardware", [True, False])
def test_autocast_keeps_the_router_in_float32_and_the_experts_in_bfloat16(monkeypatch, in_hardware):
    monkeypatch.setattr(experts, "computes_in_bf16", lambda device: in_hardware)
    moe = make(d=16, f=8, n_experts=8, top_k=3, capacity=0.8).float()
    n = torch.randn(50, 16).bfloat16().float().requires_grad_()
    chosen = sigmoid_router(n.bfloat16(), moe.routers[0], moe.bias, 3)
    plain = moe(n, moe.router(0))
    (plain.expert_out.square().sum() + plain.weights.square().sum()).backward()
    expected = [n.grad, *(p.grad for p in (moe.gate_up, moe.down, moe.routers[0]))]
    n.grad = None
    moe.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        routed = moe(n, moe.router(0))
        loss = routed.expert_out.float().square().sum() + routed.weights.square().sum()
    assert routed.expert_out.dtype == routed.shared.dtype == torch.bfloat16
    assert routed.weights.dtype == routed.z.dtype == torch.float32
    assert routed.slots.equal(plain.slots), "the same choice and the same drops"
    torch.testing.assert_close(routed.weights, plain.weights)
    assert routed.load.equal(chosen[2])
    loss.backward()
    torch.testing.assert_close(routed.expert_out.float(), plain.expert_out, rtol=0.05, atol=0.05)
    for p, grad in zip((n, moe.gate_up, moe.down, moe.routers[0]), expected, strict=True):
        assert p.grad.dtype == torch.float32
        assert (p.grad - grad).norm() < 0.02 * grad.norm()


def test_the_gradient_of_a_token_is_rounded_once(monkeypatch):
    rows = torch.tensor([256.0, 1, 1, 1]).bfloat16()[:, None].expand(4, 8).contiguous()
    monkeypatch.setattr(experts, "_backward_by_expert", lambda *a: (rows, None, None))
    x = torch.zeros(1, 8, dtype=torch.bfloat16, requires_grad=True)
    moe = MoE(8, 4, 4, 8, 0, 1, 0.0).requires_grad_(False)
    moe(x, moe.router(0)).expert_out.sum().backward()
    assert x.grad[0, 0] == 260, "one rounding of 259; rounding each sum stays at 256"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loop_computes_the_same(dtype):
    grouped = make(d=16, f=8, capacity=0.7).float()
    loop = make(d=16, f=8, capacity=0.7, backend="reference").float()
    loop.load_state_dict(grouped.state_dict())
    inputs = [x.to(dtype) for x in inputs_for(40, 16)]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        actual, expected = results(ours, grouped, inputs), results(ours, loop, inputs)
    tolerance = {"rtol": 0, "atol": 0.15} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_give_the_same_bits(dtype):
    moe = make(d=16, f=8, capacity=0.7).float()
    inputs = [x.to(dtype) for x in inputs_for(200, 16)]
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        first, second = results(ours, moe, inputs), results(ours, moe, inputs)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def fake_run(backend, device):
    with torch.device(device):
        moe = MoE(16, 5, 2, 8, 2, 2, 0.7, backend)
    n = torch.randn(30, 16, device=device, requires_grad=True)
    routed = moe(n, moe.router(1))
    (routed.expert_out.sum() + routed.weights.sum() + routed.z + routed.shared.sum()).backward()
    update_router_bias_(moe.bias, routed.load, 0.1)
    return moe, n, routed


def test_shapes_follow_without_values():
    """No value is read back: neither tensors without data nor the meta device have any."""
    with FakeTensorMode():
        fake = fake_run("grouped_mm", "cpu")
    for moe, n, routed in (fake, fake_run("grouped_mm", "meta")):
        assert routed.expert_out.shape == (60, 16) and routed.slots.shape == (30, 2)
        assert n.grad.shape == n.shape and moe.down.grad.shape == moe.down.shape
        assert moe.routers[0].grad is None and moe.routers[1].grad is not None


def test_the_plain_loop_does_read_values_back():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        fake_run("reference", "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiles_in_one_graph(dtype):
    moe = make(d=16, f=8, capacity=0.7).float()
    inputs = inputs_for(40, 16, dtype=torch.float32)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        actual, expected = results(compiled, moe, inputs), results(ours, moe, inputs)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("frozen", ["gate_up", "down", "routers", "n"])
def test_a_frozen_part_leaves_the_other_gradients_alone(frozen):
    moe, n = make(), torch.randn(9, 6, dtype=torch.float64)

    def gradients(skip):
        x = n.clone().requires_grad_(skip != "n")
        moe.requires_grad_(True)
        for name, p in moe.named_parameters():
            p.requires_grad_(not name.startswith(skip))
        moe.zero_grad(set_to_none=True)
        moe(x, moe.router(0)).expert_out.square().sum().backward()
        return {"n": x.grad} | {name: p.grad for name, p in moe.named_parameters()}

    every, some = gradients("nothing"), gradients(frozen)
    for name, grad in some.items():
        if name.startswith(frozen):
            assert grad is None
        else:
            torch.testing.assert_close(grad, every[name], **EXACT)


def test_the_op_keeps_its_contract():
    x = torch.randn(7, 6, requires_grad=True)
    moe = MoE(6, 5, 2, 4, 0, 1, 0.0)
    weights, indices, load, _ = sigmoid_router(x, moe.routers[0], None, 2)
    groups = group(indices, load, weights)
    arguments = (x, moe.gate_up, moe.down, *groups, True)
    torch.library.opcheck(_forward, arguments)


def test_nothing_is_kept_for_a_backward_that_cannot_come():
    moe, n = make(), torch.randn(9, 6, dtype=torch.float64)
    with torch.no_grad():
        groups = group(torch.zeros(9, 1, dtype=torch.int32), torch.tensor([9, 0, 0, 0, 0]), None)
        rows, a = _forward(n, moe.gate_up, moe.down, *groups, False)
    assert rows.shape == (9, 6) and a.shape[0] == 0
    torch.testing.assert_close(rows, swiglu(n, moe.gate_up[0], moe.down[0]).detach(), **EXACT)


# ---------------------------------------------------------------------------
# Refusals


REFUSED = {
    "top_k=6": {"top_k": 6},
    "top_k=0": {"top_k": 0},
    "n_experts=0": {"n_experts": 0, "top_k": 0},
    "n_routers=0": {"routers": 0},
    "n_shared=-1": {"n_shared": -1},
    "d_expert=0": {"f": 0},
    "capacity_factor=-1": {"capacity": -1.0},
    "capacity_factor=nan": {"capacity": math.nan},
    "backend='sparse'": {"backend": "sparse"},
}


@pytest.mark.parametrize("field", REFUSED)
def test_refuses_by_field(field):
    with pytest.raises(InputError, match=field):
        make(**REFUSED[field])


def test_refuses_widths_that_grouped_gemms_cannot_address():
    n = torch.randn(3, 16, dtype=torch.bfloat16)

    def rows(x, d_expert, backend="grouped_mm"):
        moe = MoE(x.shape[1], 5, 2, d_expert, 0, 1, 0.0, backend)
        return moe(x, moe.router(0)).expert_out

    with pytest.raises(InputError, match=r"d_expert=12: .* multiple of 8; use 16, or the backend"):
        rows(n, 12)
    with pytest.raises(InputError, match="d_model=12"):
        rows(n[:, :12], 16)
    assert rows(n, 12, "reference").shape == rows(n.float(), 3).shape == (6, 16)


def test_refuses_routers_cast_to_bfloat16():
    moe = MoE(16, 5, 2, 8, 0, 1, 0.0).bfloat16()
    with pytest.raises(InputError, match=r"dtype torch\.bfloat16"):
        moe(torch.randn(3, 16, dtype=torch.bfloat16), moe.router(0))


# ---------------------------------------------------------------------------
# megablocks
