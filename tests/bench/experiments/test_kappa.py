"""The fit and the table of bench.experiments.kappa."""

import json
from types import SimpleNamespace

import pytest

from bench.experiments import kappa
from bench.experiments.kappa import slope, small, table


@pytest.mark.parametrize("gamma", [-0.5, 0.0, 1.0])
def test_the_slope_is_the_power_of_the_loops(gamma):
    loops = [2, 4, 8, 16]
    assert slope(loops, [3 * r**gamma for r in loops]) == pytest.approx(gamma)


def test_the_table_has_a_row_for_each_state_and_fits_each_seed():
    """A seed that lacks an R (a run that diverged) is in the means, and in no fit."""
    results = [
        {"residual": "deeploop", "loops": r, "seed": s, "readings": [{"step": 0, "kappa": r + s}]}
        for r in (2, 4)
        for s in (0, 1)
    ]
    results[-1] = {"residual": "deeploop", "loops": 4, "seed": 1, "diverged": "loss is not finite"}
    assert table(results, "kappa").splitlines()[2:] == [
        "| deeploop | 0 | 2.5 (2 - 3) | 4 (4 - 4) | 1 (1 - 1) | 0.5 (0.5 - 0.5) |"
    ]


def test_every_half_of_a_run_is_kept(tmp_path):
    train = small("pre_norm", 8, 1, 150, tmp_path).train
    assert (train.save_every, train.keep, train.steps, train.seed) == (75, 0, 150, 1)


def test_one_r_has_no_slope():
    result = {
        "residual": "deeploop",
        "loops": 4,
        "seed": 0,
        "readings": [{"step": 0, "kappa": 3.0}],
    }
    assert table([result], "kappa").splitlines()[2:] == ["| deeploop | 0 | 3 (3 - 3) |  |  |"]


def test_a_run_that_a_signal_stopped_ends_the_bench_and_is_not_whole(tmp_path, monkeypatch):
    config = small("pre_norm", 2, 0, 4, tmp_path / "run")
    began = []

    def stopped() -> None:
        began.append(True)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "summary.json").write_text(json.dumps({"stopped_by": "SIGINT"}))

    monkeypatch.setattr(kappa, "open_run", lambda *_: SimpleNamespace(fit=stopped))
    for _ in range(2):  # it is trained anew the second time
        with pytest.raises(KeyboardInterrupt):
            kappa.reading(config)
    assert len(began) == 2
