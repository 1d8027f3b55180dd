"""What the tuner tries, and what it prints; the timing itself needs a GPU."""

import json

import pytest
import torch

from bench.kernels import candidates as c
from bench.kernels import tune
from deeploop.kernels import _launch

CASES = [
    c.Case(op, direction, 32768, d, dtype)
    for op in c.OPS
    for direction in ("backward", "forward")
    for d in (500, 768, 2048, 3000, 8192)
    for dtype in ("bf16", "fp32")
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_candidates(case):
    """The default comes first, no two are alike, and each covers the row."""
    configs = c.configs(case)
    assert configs[0] == case.launch("meta").config
    assert len(set(configs)) == len(configs) > 1
    for config in configs:
        assert config.block * config.chunks >= case.d and config.chunks % config.splits == 0
        assert (config.block * config.rows) % (32 * config.warps) == 0 and config.warps <= 32
        launch = case.launch("meta", config)
        assert launch.config == config and launch.grid > 0
        assert launch.args["BLOCK"] == config.block
        assert launch.args.get("STAGES", config.stages) == config.stages


@pytest.mark.parametrize("d", [100, 768, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_plan_can_be_read_back_from_its_config(d, itemsize):
    for plan in (*c.whole_row_plans(d), *c.chunked_plans(d)):
        config = _launch.planned(d, itemsize, plan)
        if config.chunks > config.splits or not plan.splits:
            assert c.plan_of(config, d) == plan


def test_what_fits_an_sm():
    config = _launch.LaunchConfig(1024, 1, 4, per_sm=4)
    assert c.fits(config, 128, 16384)
    assert not c.fits(config, 129, 16384)
    assert not c.fits(config, 128, 57 << 10)
    assert not c.fits(config._replace(warps=32, per_sm=3), 16, 0)


def result(case: c.Case, config: _launch.LaunchConfig, seconds: float) -> dict:
    return {
        "config": config._asdict(), "seconds": seconds, "final": True, "gb_per_s": 1.0 / seconds,
        "registers": 90, "spills": 0, "shared": 4096,
    }  # fmt: skip


def record(op: str, seconds: tuple[float, float, float]) -> dict:
    case = c.Case(op, "backward", 32768, 768, "bf16")
    plans = (None, _launch.TilePlan(4, 6, 0, 3), _launch.TilePlan(8, 3, 0, 1, 2))
    default = case.launch("meta").config
    configs = [_launch.planned(768, 2, plan) if plan else default for plan in plans]
    results = [result(case, *pair) for pair in zip(configs, seconds, strict=True)]
    return {"case": list(case), "copy_gb_per_s": 2.0, "skipped": {}, "results": results}


def test_summary_and_table():
    """The best in one case is not the best over both."""
    records = [record("post_sandwich", (1.0, 0.5, 0.52)), record("branch_sandwich", (2, 1.3, 1))]
    text = tune.summary(json.loads(json.dumps(records[0])))
    assert text.splitlines()[0].endswith("3 timed, 0 left out")
    assert "100% of copy" in text.splitlines()[1] and "stages=3" in text.splitlines()[1]
    assert text.splitlines()[3].endswith("default")
    table = tune.paste(records)
    scope = {"TilePlan": _launch.TilePlan}
    exec(table, scope)
    old = _launch._BACKWARD[1024]
    assert scope["_BACKWARD"] == _launch._BACKWARD | {
        1024: (old[0], _launch.TilePlan(8, 3, 0, 1, 2))
    }
    assert scope["_FORWARD"] == _launch._FORWARD
    assert "two gains 1024: 1.020 of the best time, over 2 cases" in table


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys):
    assert tune.main([]) == 3
    assert len(capsys.readouterr().out.splitlines()) == 1
