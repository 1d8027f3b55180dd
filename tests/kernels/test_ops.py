"""The ops on CPU: values and gradients against the float64 reference, and the contract."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import EPS, OPS, compare, double, make_gradients, make_inputs, run, subsets
from torch.utils.checkpoint import checkpoint

from deeploop import kernels
from deeploop.utils.errors import InputError

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
TOLERANCE = {
    torch.float64: {"rtol": 1e-11, "atol": 1e-11},
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 3e-2},
    torch.float16: {"rtol": 3e-3, "atol": 5e-3},
}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@every_op
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape", [(8,), (1, 1), (5, 7), (2, 3, 64), (2, 1, 3, 33), (0, 4), (2, 0, 4)]
)
def test_matches_reference(op, dtype, shape):
    inputs = make_inputs(op, shape, dtype)
    compare(op, inputs, make_gradients(inputs), **TOLERANCE[dtype])


@every_op
@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_another_eps(op, eps):
    inputs = make_inputs(op, (5, 7), torch.float64)
    compare(op, inputs, make_gradients(inputs), eps=eps, **TOLERANCE[torch.float64])


@every_op
@pytest.mark.parametrize("outputs", [(1, 1), (1, 0), (0, 1)], ids=str)
def test_every_subset_of_gradients(op, outputs):
    inputs = make_inputs(op, (6, 10), torch.float64)
    gradients = [
        g if used else None for g, used in zip(make_gradients(inputs), outputs, strict=True)
    ]
    for needs in subsets(op):
        compare(op, inputs, gradients, needs, **TOLERANCE[torch.float64])


@every_op
@pytest.mark.parametrize("which", range(1, 4))
def test_missing_gains(op, which):
    inputs = make_inputs(op, (6, 10), torch.float64)
    for i in range(len(op.inputs) - 2):
        if which >> i & 1:
            inputs[2 + i] = None
    compare(op, inputs, make_gradients(inputs), **TOLERANCE[torch.float64])


@every_op
def test_frozen_gains_ask_for_no_gain_gradient(op, monkeypatch):
    """A frozen gain pays for nothing: no column sum is taken."""
    from deeploop.kernels import _aten

    monkeypatch.setattr(_aten, "column_sum", lambda *_: pytest.fail("computed a frozen gradient"))
    inputs = make_inputs(op, (6, 10), torch.float32)
    needs = [True, True, *[False] * (len(inputs) - 2)]
    run(op.fused, op, inputs, make_gradients(inputs), needs)


LAYOUTS = {
    "sliced": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "padded": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
    "scalar": lambda x: x.flatten()[:1].expand(x.shape),
}


@every_op
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(op, layout):
    inputs = make_inputs(op, (4, 3, 10), torch.float64)
    gradients = make_gradients(inputs)
    inputs = [LAYOUTS[layout](x) for x in inputs]
    gradients = [LAYOUTS[layout](g) for g in gradients]
    compare(op, inputs, gradients, **TOLERANCE[torch.float64])


@every_op
def test_gradient_of_a_sum(op):
    """.sum() sends back one value expanded with stride 0."""
    inputs = make_inputs(op, (4, 10), torch.float64)
    one = torch.ones((), dtype=torch.float64).expand(4, 10)
    compare(op, inputs, [one, one], **TOLERANCE[torch.float64])


@every_op
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_nothing_aliases_and_gradients_stay_as_they_were(op, scale):
    inputs = [x.requires_grad_() for x in make_inputs(op, (4, 10), torch.float32)]
    gradients = make_gradients(inputs)
    before = [g.clone() for g in gradients]
    for used in ((0, 1), (0,), (1,)):
        outputs = op.fused(*inputs, scale, EPS)
        got = torch.autograd.grad(
            [outputs[i] for i in used], inputs, [gradients[i] for i in used], allow_unused=True
        )
        tensors = [*outputs, *inputs, *gradients, *(g for g in got if g is not None)]
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
        assert all(torch.equal(g, b) for g, b in zip(gradients, before, strict=True))


@every_op
def test_checkpoint_is_bitwise_equal(op):
    inputs = make_inputs(op, (16, 64), torch.bfloat16, torch.float32)
    gradients = make_gradients(inputs)

    def recomputed(*args):
        return checkpoint(op.fused, *args, use_reentrant=False)

    plain, again = (run(fn, op, inputs, gradients) for fn in (op.fused, recomputed))
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@every_op
def test_no_silent_second_derivative(op):
    inputs = [x.requires_grad_() for x in make_inputs(op, (3, 5), torch.float64)]
    h_new, n = op.fused(*inputs, op.factor, EPS)
    (dh,) = torch.autograd.grad((h_new * n).sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no autograd formula|does not require grad"):
        dh.sum().backward()


# ---------------------------------------------------------------------------
# dtypes


@every_op
def test_low_precision_branches_on_a_float32_stream(op):
    h, f, *gains = make_inputs(op, (8, 64), torch.float32)
    inputs = [h, f.bfloat16(), *gains]
    compare(op, inputs, make_gradients(inputs), **TOLERANCE[torch.bfloat16])


@every_op
@pytest.mark.parametrize("mixed", [False, True])
def test_autocast_changes_nothing(op, mixed):
    h, f, *gains = make_inputs(op, (32, 64), torch.float32)
    inputs = [h, f.bfloat16() if mixed else f, *gains]
    gradients = make_gradients(inputs)
    plain = run(op.fused, op, inputs, gradients)
    with torch.autocast("cpu", torch.bfloat16):
        under = run(op.fused, op, inputs, gradients)
    assert all(torch.equal(a, b) for a, b in zip(plain, under, strict=True))


@every_op
def test_large_float16_values_do_not_overflow(op):
    inputs = make_inputs(op, (4, 256), torch.float16)
    inputs[0] = torch.full_like(inputs[0], 3e4)
    inputs[1] = torch.full_like(inputs[1], 2e4)
    h_new, n = op.fused(*inputs, 1.0, EPS)
    assert n.isfinite().all()
    assert h_new.isfinite().all()
    torch.testing.assert_close(n, inputs[-1].expand_as(n), rtol=0.6, atol=0.6)


@every_op
def test_bfloat16_is_no_worse_than_eager_bfloat16(op):
    inputs = make_inputs(op, (64, 256), torch.bfloat16)
    gradients = make_gradients(inputs)

    def eager(h, f, *rest):
        *gains, factor, eps = rest
        d = [h.shape[-1]]
        if op.name == "pre_norm":
            h_new = torch.add(h, f, alpha=factor)
        else:
            h_new = F.rms_norm(torch.add(f, h, alpha=factor), d, gains[0], eps)
        return h_new, F.rms_norm(h_new, d, gains[-1], eps)

    exact = run(op.reference, op, double(inputs), double(gradients))
    ours, theirs = (run(fn, op, inputs, gradients) for fn in (op.fused, eager))
    for a, b, e in zip(ours, theirs, exact, strict=True):
        # Equal roundings can fall either way; a lost digit would be a factor of 2 and more.
        assert (a.double() - e).norm() <= 1.05 * (b.double() - e).norm()


@every_op
def test_n_comes_from_the_unrounded_h(op):
    """n is the exact one rounded once: a rounded h' on the way would move a third of it."""
    inputs = make_inputs(op, (64, 256), torch.bfloat16)
    _, n = op.fused(*inputs, op.factor, EPS)
    _, exact = op.reference(*double(inputs), op.factor, EPS)
    assert (n != exact.bfloat16()).double().mean() < 0.01


# ---------------------------------------------------------------------------
# Bad input


def bad(op, **changes):
    h, f, w = torch.randn(2, 4), torch.randn(2, 4), torch.randn(4)
    arguments = {"h": h, "f": f, **dict.fromkeys(op.inputs[2:], w)}
    factor = "alpha" if op.name == "post_sandwich" else "scale"
    return op.fused(**(arguments | {factor: 1.0} | changes))


@every_op
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"f": torch.randn(2, 5)}, r"f has shape \[2, 5\]; allowed: the shape of h, \[2, 4\]"),
        ({"f": torch.randn(4)}, r"f has shape \[4\]; allowed: the shape of h"),
        ({"h": torch.randn(())}, r"h has shape \[\]; allowed: \[..., d\] with d at least 1"),
        ({"h": torch.ones(2, 4).long()}, r"h has dtype torch.int64; allowed: float16, bfloat16"),
        ({"f": torch.randn(2, 4, device="meta")}, r"f is on meta; allowed: the device of h, cpu"),
        ({"w_next": torch.randn(1, 4)}, r"w_next has shape \[1, 4\]; allowed: \[4\] or None"),
        ({"w_next": torch.ones(4).int()}, r"w_next has dtype torch.int32; allowed: float16"),
        ({"w_next": torch.randn(4, device="meta")}, r"w_next is on meta; allowed: the device"),
        ({"eps": -1.0}, r"eps is -1.0; allowed: a finite number, 0 or more"),
        ({"eps": float("nan")}, r"eps is nan; allowed"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(op, changes, message):
    with pytest.raises(InputError, match=f"^{op.name}: {message}"):
        bad(op, **changes)


def test_factors_must_be_finite():
    h, w = torch.randn(2, 4), torch.randn(4)
    with pytest.raises(InputError, match=r"alpha is inf; allowed: a finite number"):
        kernels.post_sandwich(h, h, w, w, float("inf"))
    with pytest.raises(InputError, match=r"scale is nan; allowed: a finite number"):
        kernels.pre_norm(h, h, w, float("nan"))
