"""Gradients of the router's weights at large logits of either sign, relative to float64."""

import pytest
import torch
import torch.nn.functional as F

from deeploop.kernels import sigmoid_router

GRADIENT = torch.tensor([[1.0, 0.0, -0.5], [1.0, -2.0, 0.5]])  # of the weights


def gradient_by_logarithms(logits):
    """The weights are softmax(log sigmoid(logits)), in which nothing underflows."""
    x = logits.double().requires_grad_()
    (dx,) = torch.autograd.grad(F.logsigmoid(x).softmax(1), x, GRADIENT.double())
    return dx


@pytest.mark.parametrize("sign", ["both", "negative"])
@pytest.mark.parametrize("size", [20.0, 30.0, 40.0])
def test_gradients_keep_their_digits_in_the_tails(size, sign):
    """A slope of s * (1 - s) in float32 would be 0 from a logit of 17 on."""
    both = [[size, 0.5, -size], [size + 1, size / 2, -0.25]]
    below = [[-size, -size - 1, -size - 3], [-size - 2, -size - 2.5, -size - 4]]
    logits = torch.tensor(both if sign == "both" else below)
    x = logits.clone().requires_grad_()
    weights, _, _, _ = sigmoid_router(x, torch.eye(3), None, 3)
    (dx,) = torch.autograd.grad(weights, x, GRADIENT)
    exact = gradient_by_logarithms(logits)
    assert exact.all()
    torch.testing.assert_close(dx.double(), exact, rtol=1e-5, atol=0)
