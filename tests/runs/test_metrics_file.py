"""metrics.jsonl: torn and damaged lines, validations of one step, the curve of an extended run."""

import json

import pytest

from deeploop.runs.metrics_file import MetricsFile, copy_metrics
from tests.helpers.data import refused

LINES = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "val_loss": 2.5}]


def write(folder, lines, tail=""):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + tail)


def test_a_torn_last_line_is_dropped_with_a_note(tmp_path):
    write(tmp_path, LINES, '{"step": 3, "lo')
    metrics = MetricsFile(tmp_path, 3)
    assert "last line was incomplete" in metrics.note and '{"step": 3, "lo' in metrics.note
    assert metrics.read() == LINES
    assert MetricsFile(tmp_path, 3).note == ""


def test_a_step_has_one_validation(tmp_path):
    write(tmp_path, LINES)
    metrics = MetricsFile(tmp_path, 2)
    for loss in (2.25, 2.125):
        metrics.write(step=2, val_loss=loss)
    assert metrics.read() == [*LINES[:2], {"step": 2, "val_loss": 2.125}]


def test_an_extended_run_begins_with_the_curve_up_to_its_checkpoint(tmp_path):
    write(tmp_path / "a", [*LINES, {"step": 3, "loss": 1.0}])
    (tmp_path / "b").mkdir()
    copy_metrics(tmp_path / "a", tmp_path / "b", 2)
    assert MetricsFile(tmp_path / "b", 2).read() == LINES
    copy_metrics(tmp_path / "none", tmp_path / "b", 2)
    assert MetricsFile(tmp_path / "b", 2).read() == []


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "1",
        '{"loss": 1.0}',
        '{"step": 1.5}',
        '{"step": true}',
        '{"step": -1}',
        '{"step": 1, "loss": "x"}',
        '{"step": 1, "loss": [1]}',
        '{"step": 1, "loss": 1' + "0" * 400 + "}",
        '{"step": 1, "residual_rms": 1.0}',
        '{"step": 1, "residual_rms": []}',
        '{"step": 1, "router_overlap": [[1], [1]]}',
        '{"step": ' * 10**5,
        "\0" * 40,
    ],
)
def test_a_damaged_line_is_one_sentence(tmp_path, line):
    write(tmp_path, LINES, line + "\n")
    refused(lambda: MetricsFile(tmp_path, 9), "metrics.jsonl: line 4", "fix or delete it")
