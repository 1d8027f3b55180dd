"""Every setting the tuner tries computes the same, and a sweep runs from end to end."""

import json

import pytest

from bench.kernels import candidates as c
from bench.kernels import tune


def few(configs):
    """The default and one of each kind of the others: a program per SM more changes nothing."""
    kinds = {(x.rows, x.chunks > 1, x.splits, x.stages > 1): x for x in configs[1:]}
    return [configs[0], *kinds.values()]


@pytest.mark.parametrize("d", [1000, 3000])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("op", tune.DEFAULT_OPS)
def test_same_results(op, direction, d):
    case = c.Case(op, direction, 21, d, "fp32")
    default = case.launch("cpu")
    tensors = c.tensors_of(default)
    expected = c.results(case, c.with_tensors(default, tensors))
    assert expected
    for config in few(c.configs(case)):
        launch = c.with_tensors(case.launch("cpu", config), tensors)
        for a, b in zip(c.results(case, launch), expected, strict=True):
            assert tune.relative_error(a, b) < 1e-5, config


def test_sweep(monkeypatch, tmp_path, capsys):
    """With the clock, the compiler and the graphs of a GPU made up."""

    class Done:
        def __init__(self, value):
            self.value = value

        def result(self, timeout):
            return self.value

    class Pool:
        def __init__(self, *_):
            pass

        def submit(self, fn, case, config):
            spills = 7 if config.warps == 2 else 0
            return Done({"registers": 64, "spills": spills, "shared": 1 << 12})

        def shutdown(self, **_):
            pass

    class Stream:
        def wait_stream(self, other):
            pass

    def timed(runs, rounds):
        return {config: [1e-3 / (1 + config.per_sm)] * rounds for config in runs}

    monkeypatch.setattr(tune, "DEVICE", "cpu")
    monkeypatch.setattr(tune, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(tune, "interleaved_on_device", timed)
    monkeypatch.setattr(tune, "graphed", lambda run, stream: run)
    monkeypatch.setattr(tune, "copy_bandwidth", lambda device: 100.0)
    monkeypatch.setattr(tune.torch.cuda, "Stream", Stream)
    monkeypatch.setattr(tune.torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(tune.c, "configs", lambda case: few(backward(case)))
    cases = [c.Case("pre_norm", "backward", 5, 64, "fp32")]
    (record,) = tune.sweep(cases, 60.0, tmp_path / "tune.json")
    assert json.loads((tmp_path / "tune.json").read_text()) == [record]
    assert record["results"][0]["config"] == cases[0].launch("cpu").config._asdict()
    assert all("2 warps" not in why for why in record["skipped"].values())
    assert "default" in capsys.readouterr().out
    assert tune.sweep(cases, -1.0, tmp_path / "none.json") == []
    assert "not timed: pre_norm backward" in capsys.readouterr().out


def backward(case):
    return c.backward_configs(case, case.launch("meta").config)
