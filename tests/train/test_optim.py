import math

import pytest
import torch

from deeploop.config import ModelConfig, TrainConfig
from deeploop.model.looplm import LoopLM
from deeploop.train.optim import adamw, clip_gradients, learning_rate, step_if_finite


def test_wsd_is_ten_eighty_ten():
    config = TrainConfig(steps=100, lr=1.0)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0)
    assert all(rate == 1.0 for rate in rates[9:90])
    assert rates[90:] == sorted(rates[90:], reverse=True)
    assert rates[99] == pytest.approx(0.1)


def test_wsd_decays_over_its_share_to_the_floor():
    config = TrainConfig(steps=100, lr=2.0, decay=0.4, min_lr=0.1)
    rates = [learning_rate(step, config) for step in range(100)]
    assert rates[60] == 2.0 and rates[61] < 2.0
    assert rates[80] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert rates[99] == pytest.approx(2.0 * (0.1 + 0.9 / 40))


def test_cosine_starts_at_the_peak_and_ends_near_the_floor():
    config = TrainConfig(steps=1000, lr=2.0, schedule="cosine", warmup=0.02, min_lr=0.1)
    rates = [learning_rate(step, config) for step in range(1000)]
    assert max(rates) == rates[20] == pytest.approx(2.0)
    assert rates[510] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5), rel=1e-2)
    assert rates[-1] == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_short_runs_have_finite_positive_rates(schedule, steps):
    config = TrainConfig(steps=steps, lr=1.0, schedule=schedule)
    for step in range(steps):
        rate = learning_rate(step, config)
        assert math.isfinite(rate) and 0 < rate <= 1


def test_only_matrices_decay():
    model = LoopLM(ModelConfig(d_model=16, n_heads=2, n_layers=1, loops=1, vocab_size=11))
    config = TrainConfig(weight_decay=0.3, beta1=0.8, beta2=0.99)
    decayed, kept = adamw(model, config).param_groups
    assert decayed["betas"] == kept["betas"] == (0.8, 0.99)
    assert decayed["weight_decay"] == 0.3 and kept["weight_decay"] == 0
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_clip_returns_the_norm_before_and_bounds_it_after():
    layer = torch.nn.Linear(3, 3)
    layer.weight.grad = torch.full((3, 3), 2.0)
    layer.bias.grad = torch.full((3,), 2.0)
    before = math.sqrt(12 * 4)
    assert clip_gradients(layer, 0.0).item() == pytest.approx(before)
    assert layer.bias.grad.tolist() == [2.0] * 3
    assert clip_gradients(layer, 1.0).item() == pytest.approx(before)
    assert clip_gradients(layer, 0.0).item() == pytest.approx(1.0, rel=1e-4)


def test_a_step_moves_by_the_rate_it_is_given():
    """Adam's first step is lr * sign(gradient)."""
    model = torch.nn.Linear(4, 4)
    optimizer = adamw(model, TrainConfig(lr=7.0, weight_decay=0.0))
    before = model.weight.detach().clone()
    model(torch.ones(4)).sum().backward()
    step_if_finite(optimizer, torch.tensor(1.0), 0.125)
    torch.testing.assert_close(before - model.weight, torch.full((4, 4), 0.125))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = torch.nn.Linear(4, 4)
    optimizer = adamw(model, TrainConfig())
    model(torch.ones(4)).sum().backward()
    step_if_finite(optimizer, torch.tensor(1.0), 0.1)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    moments = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    model.weight.grad.fill_(bad)
    step_if_finite(optimizer, clip_gradients(model, 1.0), 0.1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    for p, state in optimizer.state.items():
        for name, value in state.items():
            assert torch.equal(value, moments[id(p)][name])
