"""AdamATan2 against its formula, what skips it, and that its state is AdamW's."""

import math

import pytest
import torch

from deeploop.config import ModelConfig, TrainConfig
from deeploop.model.looplm import LoopLM
from deeploop.train.adam_atan2 import AdamATan2
from deeploop.train.optim import make_optimizer, step_if_finite
from deeploop.utils.errors import InputError


def formula(w, gradients, lr, b1, b2, decay):
    """Each number by itself, in Python's floats."""
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        w = w * (1 - lr * decay)
        w -= lr / (1 - b1**t) * math.atan2(m, math.sqrt(v / (1 - b2**t)))
    return w


@pytest.mark.parametrize("skip_flag", [None, 0.0])
def test_a_hundred_steps_are_the_formulas(skip_flag):
    torch.manual_seed(0)
    matrix, vector = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    params = [matrix.clone().requires_grad_(), vector.clone().requires_grad_()]
    groups = [{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:]}]
    optimizer = AdamATan2(groups, lr=0.02, betas=(0.8, 0.97))
    if skip_flag is not None:
        optimizer.found_inf = torch.tensor(skip_flag)
    gradients = [[torch.randn_like(p) for p in params] for _ in range(100)]
    gradients[0][1].zero_()  # atan2(0, 0) = 0
    for grads in gradients:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    for i, (start, decay) in enumerate(((matrix, 0.3), (vector, 0.0))):
        for j, w in enumerate(start.flatten().tolist()):
            series = [grads[i].flatten()[j].item() for grads in gradients]
            wanted = formula(w, series, 0.02, 0.8, 0.97, decay)
            assert params[i].flatten()[j].item() == pytest.approx(wanted, rel=1e-10, abs=1e-12)


def test_it_does_not_change_with_the_gradients_scale():
    made = []
    for scale in (1.0, 1e-12):
        p = torch.ones(5, dtype=torch.float64, requires_grad=True)
        optimizer = AdamATan2([p], lr=0.1)
        for step in range(3):
            p.grad = scale * torch.linspace(-1, 2 + step, 5, dtype=torch.float64)
            optimizer.step()
        made.append(p.detach())
    torch.testing.assert_close(*made, rtol=1e-12, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("before", [0, 2])
def test_a_step_that_is_not_finite_changes_nothing(bad, before):
    """Neither weights nor moments nor the count; the steps after it are as if it had not been."""

    def run(gradients):
        p = torch.linspace(1, 2, 4).requires_grad_()
        optimizer = AdamATan2([p], weight_decay=0.5)
        for g in gradients:
            p.grad = g.clone()
            step_if_finite(optimizer, g.norm(), 0.1)
        return [p.detach(), *optimizer.state[p].values()]

    torch.manual_seed(0)
    good = list(torch.randn(4, 4))
    spoilt = torch.tensor([1.0, bad, 2.0, 3.0])
    torch.testing.assert_close(
        run([*good[:before], spoilt, *good[before:]]), run(good), rtol=0, atol=0
    )


def test_it_is_a_value_with_the_groups_and_the_state_of_adamw():
    model = LoopLM(ModelConfig(d_model=16, n_heads=2, vocab_size=5, seq_len=4))
    tokens = torch.arange(4)[None]
    states = []
    for name in ("adamw", "adam_atan2"):
        optimizer = make_optimizer(model, TrainConfig(optimizer=name, lr=3.0))
        model(tokens).sum().backward()
        optimizer.step()
        states.append(optimizer.state_dict())
    assert isinstance(optimizer, AdamATan2)
    one, other = states
    for mine, theirs in zip(one["param_groups"], other["param_groups"], strict=True):
        same = ("params", "lr", "betas", "weight_decay")
        assert [mine[k] for k in same] == [theirs[k] for k in same]
    for index, state in one["state"].items():
        for name, tensor in state.items():
            twin = other["state"][index][name]
            assert (tensor.shape, tensor.dtype) == (twin.shape, twin.dtype), name
    with pytest.raises(InputError, match=r"train\.optimizer='sgd': must be one of adamw, "):
        TrainConfig(optimizer="sgd")
