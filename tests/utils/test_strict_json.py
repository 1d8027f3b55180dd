"""JSON has no NaN and no infinity."""

import json
import math

import pytest

from deeploop.runs import plots
from deeploop.runs.metrics_file import MetricsFile
from deeploop.utils.disk import write_json
from deeploop.utils.strict_json import to_json


def refuse(constant):
    raise ValueError(f"{constant} is not JSON")


def test_a_number_that_is_not_finite_is_null():
    value = {"a": math.nan, "b": [1.5, (math.inf, -math.inf)], "c": "NaN", "d": None, "e": 2}
    read = json.loads(to_json(value), parse_constant=refuse)
    assert read == {"a": None, "b": [1.5, [None, None]], "c": "NaN", "d": None, "e": 2}


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl"])
def test_the_files_of_a_run_are_json(name, tmp_path):
    values = {"step": 1, "val_loss": math.nan, "residual_rms": [1.0, math.inf]}
    if name == "summary.json":
        write_json(tmp_path / name, values)
    else:
        MetricsFile(tmp_path, 0).write(**values)
    read = json.loads((tmp_path / name).read_text(), parse_constant=refuse)
    assert read == {"step": 1, "val_loss": None, "residual_rms": [1.0, None]}


def test_figures_that_are_null_are_left_out_of_the_plots(tmp_path, pictures):
    trained = {"loss": None, "residual_rms": [1.0, None], "load_spread": [None, 0.1]}
    trained["router_overlap"] = [[1.0, None], [None, 1.0]]
    metrics = [{"step": 1, **trained}, {"step": 1, "val_loss": None}, {"step": 2, **trained}]
    plots.loss(metrics, {}, tmp_path / "loss.png")
    plots.loops(metrics, tmp_path / "loops.png")
    assert (tmp_path / "loss.png").exists() and (tmp_path / "loops.png").exists()
