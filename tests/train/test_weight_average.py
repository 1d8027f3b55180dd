"""The average of weights against its formula, in and out of the model."""

import pytest
import torch
from torch import nn

from deeploop.train.weight_average import WeightAverage


def trained(average, model, steps):
    for step in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(step + 1.0)
        average.update()


def test_it_is_the_formulas_and_is_used_inside_the_context_alone():
    model = nn.Linear(2, 1).double()
    w = a = model.weight[0, 0].item()
    average = WeightAverage(model, 0.9)
    trained(average, model, 5)
    for step in range(5):
        w += step + 1.0
        a = 0.9 * a + 0.1 * w
    inside, before = None, [(p, p.data_ptr(), p.detach().clone()) for p in model.parameters()]
    with pytest.raises(RuntimeError, match="an error"), average.used():
        inside = model.weight[0, 0].item()
        raise RuntimeError("an error")
    assert inside == pytest.approx(a, rel=1e-12)
    for p, place, weights in before:
        assert p.data_ptr() == place and torch.equal(p, weights)
    assert average.state_dict()["weight"][0, 0].item() == pytest.approx(a, rel=1e-12)


def test_it_goes_on_from_its_state():
    torch.manual_seed(0)
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    whole, first = WeightAverage(model, 0.99), None
    trained(whole, model, 3)
    other.load_state_dict(model.state_dict())
    first = WeightAverage(other, 0.99)
    first.load_state_dict({name: a.clone() for name, a in whole.state_dict().items()})
    trained(whole, model, 2)
    trained(first, other, 2)
    for name, a in whole.state_dict().items():
        assert torch.equal(a, first.state_dict()[name])
    with pytest.raises(KeyError, match="bias"):
        whole.load_state_dict({"weight": torch.zeros(3, 2)})
