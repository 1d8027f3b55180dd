"""Derivatives that no op has are refused by the name of the op, never wrong in silence."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from deeploop.kernels import expert_combine, sigmoid_router
from deeploop.model.loss import linear_cross_entropy
from deeploop.model.moe.experts import grouped_mm
from tests.helpers.kernel_cases import FULL, make_inputs
from tests.helpers.moe_cases import combine_inputs

TOKEN = torch.tensor([0, 1, 0], dtype=torch.int32)
GROUPS = (TOKEN, torch.tensor([[0], [1], [2]], dtype=torch.int32), torch.tensor([1, 3]).int())


def _row_ops():
    for case in FULL:
        inputs = make_inputs(case, (3, 8), torch.float32)
        yield case.op, lambda *xs, case=case: case.fused(xs)[0], inputs


def _other_ops():
    h, routed, slots, weights, shared, *gains = combine_inputs(3, 8, 2, spare=0)
    routed = torch.randn_like(routed)
    yield (
        "expert_combine",
        lambda h, routed, weights, shared: expert_combine(
            h, routed, slots, weights, shared, *gains, scale=0.5
        )[0],
        [h, routed, weights, shared],
    )
    x, w = torch.randn(3, 8), torch.randn(4, 8)
    yield "sigmoid_router", lambda x, w: sigmoid_router(x, w, None, 2)[0], [x, w]
    experts = [x, torch.randn(2, 8, 8), torch.randn(2, 8, 4)]
    yield "grouped_mm", lambda x, a, b: grouped_mm(x, a, b, *GROUPS), experts
    loss = partial(linear_cross_entropy, targets=torch.tensor([0, 1, 3]))
    yield "linear_cross_entropy", loss, [x, w]


OPS = {name: (fn, inputs) for name, fn, inputs in (*_row_ops(), *_other_ops())}
every_op = pytest.mark.parametrize("name", OPS)


@every_op
def test_forward_mode_is_refused_for_every_input(name):
    fn, inputs = OPS[name]
    for i, x in enumerate(inputs):
        with forward_ad.dual_level():
            duals = list(inputs)
            duals[i] = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(NotImplementedError, match=f"^{name}: forward-mode"):
                fn(*duals)


@every_op
@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap of grad"])
def test_transforms_that_differentiate_are_refused(name, transform):
    fn, inputs = OPS[name]

    def scalar(*xs):
        return fn(*xs).sum()

    with pytest.raises(NotImplementedError, match=rf"^{name}: torch\.func\.grad"):
        if transform == "grad":
            torch.func.grad(scalar)(*inputs)
        elif transform == "jvp":
            torch.func.jvp(scalar, tuple(inputs), tuple(inputs))
        else:
            torch.func.vmap(torch.func.grad(scalar))(*(x[None] for x in inputs))


@every_op
def test_a_second_derivative_is_refused(name):
    fn, inputs = OPS[name]
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    op = name if name == "linear_cross_entropy" else r"deeploop\.\w+_backward"
    with pytest.raises(RuntimeError, match=op):  # NotImplementedError is one
        first = torch.autograd.grad(fn(*leaves).square().sum(), leaves, create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_of_values_is_the_loop():
    fn, (x, w) = OPS["sigmoid_router"]
    batch = torch.stack([x, 2 * x])
    mapped = torch.func.vmap(lambda x: fn(x, w))(batch)
    torch.testing.assert_close(mapped, torch.stack([fn(x, w) for x in batch]))
