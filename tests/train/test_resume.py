"""A run goes on, begins again or is refused: copies, extensions, kills before a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest

from deeploop.eval.generate import generate
from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError
from tests.helpers.data import refused


@pytest.fixture
def short(config):
    return config.replace("train", steps=4, log_every=1, eval_every=2, save_every=2, eval_tokens=64)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder, field):
    return [line["step"] for line in lines(folder) if field in line]


def test_a_checkpoint_copied_by_itself_generates_and_is_extended(short, quiet, tmp_path):
    open_run(short, quiet).fit()
    texts = generate(short.train.out, "the quick", tokens=4)
    copy = tmp_path / "elsewhere" / "best"
    shutil.copytree(tmp_path / "run" / "checkpoints" / "step_000004", copy)
    shutil.rmtree(tmp_path / "run")
    assert generate(str(copy), "the quick", tokens=4) == texts
    found = checkpoint.find(str(copy))
    refused(lambda: open_run(short.replace("train", out="", steps=5), quiet, found), "give --out")
    longer = short.replace("train", out=str(tmp_path / "longer"), steps=5)
    assert open_run(longer, quiet, found).fit()["step"] == 5


def test_an_old_checkpoint_reads_the_description_of_its_run(short, quiet, tmp_path):
    open_run(short, quiet).fit()
    path = tmp_path / "run" / "checkpoints" / "step_000004"
    texts = generate(str(path), "the quick", tokens=4)
    (path / "corpus.json").unlink()
    state = json.loads((path / "state.json").read_text())
    for name in ("corpus.json", "state.json"):
        del state["sha256"][name]
    (path / "state.json").write_text(json.dumps(state))
    assert generate(str(path), "the quick", tokens=4) == texts


def test_an_extended_run_has_the_whole_curve(short, quiet, tmp_path):
    open_run(short, quiet).fit()
    half = checkpoint.find(str(tmp_path / "run" / "checkpoints" / "step_000002"))
    open_run(short.replace("train", out=str(tmp_path / "fork")), quiet, half).fit()
    assert steps_of(tmp_path / "fork", "loss") == [1, 2, 3, 4]
    assert steps_of(tmp_path / "fork", "val_loss") == [2, 4]
    losses = [[m["loss"] for m in lines(tmp_path / n) if "loss" in m] for n in ("run", "fork")]
    assert losses[0] == losses[1]


def test_a_finished_run_that_is_resumed_has_one_validation_a_step(short, quiet, tmp_path):
    open_run(short, quiet).fit()
    open_run(short, quiet, checkpoint.find(short.train.out)).fit()
    assert steps_of(tmp_path / "run", "val_loss") == [2, 4]


def stopped_before_a_checkpoint(config, quiet, steps=1):
    """A run killed after some steps: its folder, and no process."""
    trainer = open_run(config, quiet)
    trainer.metrics = type("Metrics", (), {"write": lambda self, **_: None})()
    for _ in range(steps):
        trainer.step()
    with trainer.folder.joinpath("metrics.jsonl").open("w") as file:
        file.write('{"step": 1, "loss": 9.0}\n{"step"')
    (trainer.folder / "checkpoints" / ".step_000001.tmp").mkdir(parents=True)
    (trainer.folder / ".summary.json.x.tmp").write_text("{")
    trainer.lock.close()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_stopped_before_its_first_checkpoint_begins_again(short, quiet, tmp_path, resumed):
    stopped_before_a_checkpoint(short, quiet)
    ckpt = checkpoint.find(short.train.out, begin=True) if resumed else None
    refused(lambda: checkpoint.find(short.train.out), "has no checkpoint")
    trainer = open_run(short, quiet, ckpt)
    assert trainer.done == 0
    trainer.fit()
    assert steps_of(tmp_path / "run", "loss") == [1, 2, 3, 4]
    assert [p for p in (tmp_path / "run").rglob(".*")] == []
    refused(lambda: open_run(short, quiet), "already exists", f"--resume {short.train.out}")


def test_a_run_of_other_options_does_not_begin_in_its_place(short, quiet, tmp_path):
    stopped_before_a_checkpoint(short, quiet)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    refused(lambda: open_run(short.replace("train", lr=0.5), quiet), "train.lr=0.0015", "has 0.5")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_failed_beginning_deletes_nothing_of_an_earlier_one(short, quiet, tmp_path, monkeypatch):
    stopped_before_a_checkpoint(short, quiet)

    def full(*_):
        raise InputError("full")

    monkeypatch.setattr("deeploop.train.setup.write_run_files", full)
    refused(lambda: open_run(short, quiet), "full")
    assert (tmp_path / "run" / "config.json").exists()


def test_torchruns_restart_goes_on(short, quiet, monkeypatch):
    open_run(short.replace("train", steps=2), quiet).fit()
    again = short.replace("train", steps=2, precision="auto", device="auto")
    refused(lambda: open_run(again, quiet), "already exists")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert open_run(again, quiet).done == 2
    text = Path(again.data.path)
    monkeypatch.chdir(text.parent)  # the run has stored the absolute path
    assert open_run(again.replace("data", path=text.name), quiet).done == 2
    refused(lambda: open_run(again.replace("train", lr=0.5), quiet), "already exists")


def test_the_newest_checkpoint_is_chosen_under_the_lock(short, quiet, tmp_path):
    open_run(short, quiet).fit()
    newest = tmp_path / "run" / "checkpoints" / "step_000004"
    newest.rename(tmp_path / "aside")
    before = checkpoint.find(short.train.out)
    (tmp_path / "aside").rename(newest)  # as another process does that just ends
    assert before.step == 2 and open_run(short, quiet, before).done == 4
    older = checkpoint.find(str(newest.with_name("step_000002")))
    refused(lambda: open_run(short, quiet, older), "already at step_000004")


def test_a_failed_prune_does_not_end_a_run(short, quiet, tmp_path, monkeypatch):
    trainer = open_run(short.replace("train", save_every=1, keep=1), quiet)

    def busy(path, **_):
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(
        "deeploop.runs.checkpoint._delete", lambda path: path.exists() and busy(path)
    )
    assert trainer.fit()["step"] == 4
    assert "could not be deleted (Directory not empty)" in quiet.file.getvalue()
