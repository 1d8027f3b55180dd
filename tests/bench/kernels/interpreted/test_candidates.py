"""Every launch setting that the tuner tries computes the same."""

import pytest
import torch

from bench.kernels import candidates as c
from bench.kernels import tune
from tests.helpers.launches import patch_language_once

ROWS = 5  # more than the programs of a launch


def few(configs):
    """Return the default and the one of each kind that has the fewest programs per SM."""
    fewest_last = sorted(configs[1:], key=lambda x: -x.per_sm)
    kinds = {(x.rows, x.chunks > 1, x.splits, x.stages > 1): x for x in fewest_last}
    return [configs[0], *kinds.values()]


@pytest.mark.parametrize("d", [1000, 2050])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", tune.DEFAULT_OPS)
def test_same_results(op, direction, d, monkeypatch):
    patch_language_once(monkeypatch)
    torch.manual_seed(0)
    case = c.Case(op, direction, ROWS, d, "fp32")
    default = case.launch("cpu")
    tensors = c.tensors_of(default)
    expected = c.results(case, c.with_tensors(default, tensors))
    assert expected
    for config in few(c.configs(case)):
        launch = c.with_tensors(case.launch("cpu", config), tensors)
        for a, b in zip(c.results(case, launch), expected, strict=True):
            assert tune.relative_error(a, b) < 1e-5, config
