"""Validation after several numbers of loops: in the metrics, the log and the summary."""

import json

import pytest

from deeploop.eval.tasks import task_accuracy
from deeploop.eval.validate import validate, validate_after
from deeploop.runs.metrics_file import MetricsFile
from deeploop.train.setup import open_run


def test_each_validation_has_the_losses_after_other_loops(config, quiet, tmp_path):
    trainer = open_run(config.replace("train", steps=10, eval_every=5, eval_loops="1,4"), quiet)
    summary = trainer.fit()
    lines = [m for m in MetricsFile(tmp_path / "run", 10, write=False).read() if "val_loss" in m]
    assert [m["step"] for m in lines] == [5, 10]
    assert all(m["val_loops"] == [1, 4] for m in lines)
    assert len({loss for m in lines for loss in [m["val_loss"], *m["val_loop_losses"]]}) == 6
    losses = validate_after(trainer.model, trainer.corpus, [1, 4], 3, "fp32", 256)
    assert lines[-1]["val_loop_losses"] == pytest.approx(list(losses.values()), rel=1e-6)
    whole = validate(trainer.model, trainer.corpus, 3, "fp32", 256)
    assert lines[-1]["val_loss"] == pytest.approx(whole, rel=1e-6)
    said = quiet.file.getvalue()
    one, four = lines[-1]["val_loop_losses"]
    assert f"bits/byte); after loops 1: {one:.3f}, 4: {four:.3f}\n" in said
    assert summary["val_loops"] == [1, 4] and summary["val_loop_losses"] == [one, four]
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_a_task_has_its_exact_matches_after_each(config, quiet, tmp_path):
    config = config.replace("data", path="", task="addition", difficulty="1", eval_difficulty="1")
    config = config.replace("train", steps=2, eval_loops="1,2", eval_tokens=60)
    trainer = open_run(config, quiet)
    summary = trainer.fit()
    task, losses = trainer.corpus.task, summary["val_loop_losses"]
    assert len(losses) == 2 and losses[1] == summary["val_loss"]
    exact = [task_accuracy(trainer.model, task, 1, n, examples=20).exact for n in (1, 2)]
    assert summary["val_loop_accuracies"] == pytest.approx(exact)
    assert summary["val_loop_accuracies"][1] == summary["val_accuracy"]
    assert "of answers); after loops 1: " in quiet.file.getvalue()


def test_a_run_without_them_has_none(config, quiet, tmp_path):
    summary = open_run(config.replace("train", steps=5), quiet).fit()
    lines = MetricsFile(tmp_path / "run", 5, write=False).read()
    assert not any("val_loops" in m for m in [*lines, summary])
    assert "after loops" not in quiet.file.getvalue()


def test_a_loss_that_is_not_finite_after_too_many_loops_does_not_end_the_run(
    config, quiet, tmp_path, monkeypatch
):
    trainer = open_run(config.replace("train", steps=5, eval_loops="1,2,9"), quiet)
    monkeypatch.setattr(
        "deeploop.train.held_out.validate_after", lambda *_: {1: 3.0, 2: 2.5, 9: float("inf")}
    )
    assert trainer.fit()["val_loss"] == 2.5
    line = MetricsFile(tmp_path / "run", 5, write=False).read()[-1]
    assert line["val_loop_losses"] == [3.0, 2.5, None]
