"""Each module is its function on the gains it holds, forward and backward."""

import pytest
import torch

from deeploop import kernels
from deeploop.kernels import modules

D, TOKENS, EXPERTS, TOP_K = 16, 6, 5, 2


def rows():
    return torch.randn(TOKENS, D, requires_grad=True)


def gains(module, *names):
    return [getattr(module, name) for name in names]


def combine_inputs():
    routed = torch.randn(TOKENS * TOP_K, D, requires_grad=True)
    slots = torch.randperm(TOKENS * TOP_K, dtype=torch.int32).view(TOKENS, TOP_K)
    return [rows(), routed, slots, torch.rand(TOKENS, TOP_K, requires_grad=True), rows()]


def looping(module, h, f, local, glob):
    read_local, read_global = kernels.looping_coefficients(2, 1, 3, 0.9)
    factors = {"scale": 0.3, "decay": 0.9, "read_local": read_local, "read_global": read_global}
    return kernels.looping_update(h, f, local, glob, module.w_next, **factors, eps=1e-3)


CASES = {
    "PostSandwich": (
        lambda: modules.PostSandwich(D, 2.5, 1e-3),
        lambda m, h, f: kernels.post_sandwich(h, f, *gains(m, "w_out", "w_next"), 2.5, 1e-3),
        lambda: [rows(), rows()],
    ),
    "PreNorm": (
        lambda: modules.PreNorm(D, 0.7, 1e-3),
        lambda m, h, f: kernels.pre_norm(h, f, m.w_next, 0.7, 1e-3),
        lambda: [rows(), rows()],
    ),
    "BranchSandwich": (
        lambda: modules.BranchSandwich(D, 0.7, 1e-3),
        lambda m, h, f: kernels.branch_sandwich(h, f, *gains(m, "w_branch", "w_next"), 0.7, 1e-3),
        lambda: [rows(), rows()],
    ),
    "Inject": (
        lambda: modules.Inject(D, 0.9, 0.1, 1e-3),
        lambda m, h, x: kernels.inject(h, x, m.w_next, 0.9, 0.1, 1e-3),
        lambda: [rows(), rows()],
    ),
    "LoopingUpdate": (
        lambda: Second(modules.LoopingUpdate(D, 1, 3, 0.3, 0.9, 1e-3)),
        lambda m, *tensors: looping(m.module, *tensors),
        lambda: [rows(), rows(), rows(), rows()],
    ),
    "ExpertCombine": (
        lambda: modules.ExpertCombine(D, 0.7, 1e-3),
        lambda m, *x: kernels.expert_combine(*x, *gains(m, "w_branch", "w_next"), 0.7, 1e-3),
        combine_inputs,
    ),
    "SigmoidRouter": (
        lambda: modules.SigmoidRouter(D, EXPERTS, TOP_K),
        lambda m, x: kernels.sigmoid_router(x, m.weight, m.bias, TOP_K),
        lambda: [rows()],
    ),
}


class Second(torch.nn.Module):
    """A LoopingUpdate in its second loop."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *tensors):
        return self.module(*tensors, loop=2)


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_its_function_with_its_gains(name):
    torch.manual_seed(0)
    make, function, make_inputs = CASES[name]
    module, inputs = make(), make_inputs()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(torch.rand_like(tensor))
    leaves = [x for x in (*inputs, *module.parameters()) if x.requires_grad]
    actual, expected = (
        results_and_gradients(outputs, leaves)
        for outputs in (module(*inputs), function(module, *inputs))
    )
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def results_and_gradients(outputs, leaves):
    total = sum((y * y).sum() for y in outputs if y.requires_grad)
    gradients = torch.autograd.grad(total, leaves)
    assert all(g.any() for g in gradients)
    return [*outputs, *gradients]


def test_every_op_has_a_module():
    # looping_update_two is a variant of looping_update for comparing LOOM's readings.
    from deeploop.kernels import registry

    names = {"".join(word.title() for word in op.split("_")) for op in registry.OPS}
    assert names - {"LoopingUpdateTwo"} == set(CASES)


def test_gains_start_at_one_in_the_dtype_asked_for():
    module = modules.PostSandwich(D, 1.0, dtype=torch.bfloat16)
    for gain in module.parameters():
        assert gain.dtype == torch.bfloat16 and (gain == 1).all()
