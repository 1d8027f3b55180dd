import math

import pytest
import torch

from deeploop.config import ModelConfig, TrainConfig
from deeploop.model.looplm import LoopLM
from deeploop.train.optim import clip_gradients, learning_rate, make_optimizer, step_if_finite


def rates(**fields):
    config = TrainConfig(**{"lr": 2.0} | fields)
    return [learning_rate(step, config) for step in range(config.steps)]


def test_wsd_is_ten_eighty_ten():
    wsd = rates(steps=100, lr=1.0)
    assert wsd[0] == pytest.approx(0.1) and wsd[9] == pytest.approx(1.0)
    assert all(rate == 1.0 for rate in wsd[9:90])
    assert wsd[90:] == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])


def test_wsd_decays_over_its_share_to_the_floor():
    wsd = rates(steps=100, decay=0.4, min_lr=0.1)
    assert wsd[59] == 2.0 and wsd[60] < 2.0
    assert wsd[79] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))


def test_cosine_falls_from_the_peak_to_the_floor():
    cosine = rates(steps=1001, schedule="cosine", warmup=0.02, min_lr=0.1)
    assert max(cosine) == cosine[19] == pytest.approx(2.0)
    assert cosine[19:] == sorted(cosine[19:], reverse=True)
    assert (cosine[509] + cosine[510]) / 2 == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))


def test_constant_stays_at_the_peak_after_the_warm_up():
    constant = rates(steps=100, schedule="constant", warmup=0.05, decay=0.9)
    assert constant[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert set(constant[4:]) == {2.0}


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("steps", [2, 3, 10, 280])
def test_one_step_is_at_the_peak_and_the_last_is_exactly_at_the_floor(schedule, warmup, steps):
    for min_lr in (0.0, 0.1, 0.9):
        decay = min(1 - warmup, 0.99)
        run = rates(steps=steps, schedule=schedule, warmup=warmup, decay=decay, min_lr=min_lr)
        last_rises = round(warmup * steps) == steps
        assert max(run) == 2.0
        assert run[-1] == (2.0 if last_rises else 2.0 * min_lr)


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 1},
        {"steps": 1, "schedule": "cosine"},
        {"steps": 1, "warmup": 0.0, "decay": 0.99},
        {"steps": 7, "warmup": 0.99, "decay": 0.0},
        {"steps": 7, "warmup": 0.99, "decay": 0.0, "schedule": "cosine"},
        {"steps": 7, "warmup": 0.0, "decay": 0.0},
        {"steps": 4, "warmup": 0.1, "decay": 0.1},
    ],
)
def test_without_a_step_to_decay_over_the_rate_stays(fields):
    assert rates(**fields)[-1] == 2.0


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_a_longer_run_takes_the_schedule_of_its_new_length(schedule):
    short = rates(steps=20, schedule=schedule, min_lr=0.1)
    longer = rates(steps=40, schedule=schedule, min_lr=0.1)
    assert short[-1] == longer[-1] == 2.0 * 0.1
    assert longer[20] > short[-1]


def test_only_matrices_decay():
    model = LoopLM(ModelConfig(d_model=16, n_heads=2, n_layers=1, loops=1, vocab_size=11))
    config = TrainConfig(weight_decay=0.3, beta1=0.8, beta2=0.99)
    decayed, kept = make_optimizer(model, config).param_groups
    assert decayed["betas"] == kept["betas"] == (0.8, 0.99)
    assert decayed["weight_decay"] == 0.3 and kept["weight_decay"] == 0
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in kept["params"]} == {1}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("decay_gains", [False, True])
def test_parcaes_recurrence_and_readout_never_decay(decay_gains):
    """A_log, dt, B and C (the released code); no other parameter moves between the groups."""
    shape = {"d_model": 16, "n_heads": 2, "n_layers": 1, "loops": 1, "vocab_size": 11}
    model = LoopLM(ModelConfig(**shape, inject="contractive", readout_map=True, input_norm=True))
    config = TrainConfig(weight_decay=0.3, decay_gains=decay_gains)
    names = {p: name for name, p in model.named_parameters()}
    groups = make_optimizer(model, config).param_groups
    assert [g["weight_decay"] for g in groups] == [0.3, 0.3 * decay_gains, 0]
    assert {names[p] for p in groups[2]["params"]} == {
        "borders.injection.log_rate", "borders.injection.raw_step",
        "borders.injection.linear.weight", "borders.readout.weight",
    }  # fmt: skip
    assert "borders.norm_input.weight" in {names[p] for p in groups[1]["params"]}
    assert sum(len(g["params"]) for g in groups) == len(names)


def test_groups_have_names_even_without_parameters():
    """A checkpoint gives moments back by name; a model without gains has none in the second."""
    model = torch.nn.Linear(4, 4, bias=False)
    groups = make_optimizer(model, TrainConfig()).param_groups
    assert [g["param_names"] for g in groups] == [["weight"], []]


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
    optimizer = make_optimizer(model, TrainConfig(lr=7.0, weight_decay=0.0))
    before = model.weight.detach().clone()
    model(torch.ones(4)).sum().backward()
    step_if_finite(optimizer, torch.tensor(1.0), 0.125)
    torch.testing.assert_close(before - model.weight, torch.full((4, 4), 0.125))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = torch.nn.Linear(4, 4)
    optimizer = make_optimizer(model, TrainConfig())
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
