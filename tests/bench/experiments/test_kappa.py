"""The fit and the tables of kappa_R."""

import json
from types import SimpleNamespace

import pytest

from bench.experiments import kappa


@pytest.mark.parametrize("gamma", [-0.5, 0.0, 1.0])
def test_the_slope_is_the_power_of_the_loops(gamma):
    loops = [2, 4, 8, 16]
    assert kappa.slope(loops, [3 * r**gamma for r in loops]) == pytest.approx(gamma)


def test_a_seed_that_diverged_is_in_the_means_and_in_no_fit():
    results = [
        {"residual": "deeploop", "loops": r, "seed": s, "readings": [{"step": 0, "kappa": r + s}]}
        for r in (2, 4)
        for s in (0, 1)
    ]
    results[-1] = {"residual": "deeploop", "loops": 4, "seed": 1, "diverged": "loss is not finite"}
    table = kappa.kappa_table(results, "kappa").splitlines()
    assert table[2:] == ["| deeploop | 0 | 2.5 (2 to 3) | 4 | 1 | 0.5 |"]
    one_loop_count = kappa.kappa_table(results[:1], "kappa").splitlines()
    assert one_loop_count[2:] == ["| deeploop | 0 | 2 |  |  |"]


def test_a_run_that_a_signal_stopped_ends_the_experiment_and_is_not_complete(tmp_path, monkeypatch):
    config = kappa.small("pre_norm", 2, 0, 4, tmp_path / "run")
    starts = []

    def stopped() -> None:
        starts.append(True)
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "summary.json").write_text(json.dumps({"stopped_by": "SIGINT"}))

    monkeypatch.setattr(kappa, "open_run", lambda *_, **__: SimpleNamespace(fit=stopped))
    for _ in range(2):  # trained again the second time
        with pytest.raises(KeyboardInterrupt):
            kappa.measure(config)
    assert len(starts) == 2
