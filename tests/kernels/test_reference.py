"""The reference is differentiable in float64 and obeys the paper's lemmas."""

import itertools

import pytest
import torch

from deeploop.kernels import reference
from tests.helpers.kernel_cases import CASES, make_inputs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradcheck(case):
    torch.manual_seed(0)
    inputs = [x.requires_grad_() for x in make_inputs(case, (3, 5), torch.float64)]
    assert torch.autograd.gradcheck(lambda *xs: tuple(case.reference(xs)), inputs)


def unit_rms(*shape):
    x = torch.randn(*shape, dtype=torch.float64)
    return x / x.square().mean(-1, keepdim=True).sqrt()


def test_lemma_a1_norm_of_a_scaled_sum_is_a_tangent_step():
    """RMSNorm(alpha x + z) = x + (z - <x, z>_d x) / alpha + O(RMS(z)^2 / alpha^2)."""
    torch.manual_seed(0)
    alpha, x, z = 8.0, unit_rms(4, 96), unit_rms(4, 96)
    errors = []
    for size in (1.0, 0.5, 0.25, 0.125):
        step = size * z
        h, _ = reference.post_sandwich(x, step, None, None, alpha, eps=0.0)
        tangent = x + (step - (x * step).mean(-1, keepdim=True) * x) / alpha
        errors.append((h - tangent).square().mean().sqrt().item())
    for coarse, fine in itertools.pairwise(errors):
        assert 3.5 < coarse / fine < 4.5, f"not second order: {errors}"


def test_lemma_a2_inner_norm_is_the_identity_in_value_and_a_projection_in_slope():
    torch.manual_seed(0)
    x = unit_rms(24)
    torch.testing.assert_close(reference.rms_norm(x, None, 0.0), x)
    jacobian = torch.autograd.functional.jacobian(lambda v: reference.rms_norm(v, None, 0.0), x)
    torch.testing.assert_close(jacobian, jacobian.T)
    torch.testing.assert_close(jacobian @ jacobian, jacobian)
    torch.testing.assert_close(
        torch.linalg.matrix_norm(jacobian, 2), torch.ones((), dtype=torch.float64)
    )
    torch.testing.assert_close(jacobian @ x, torch.zeros_like(x))
