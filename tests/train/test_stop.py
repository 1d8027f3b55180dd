"""A run stops when it is asked to, also during a validation, and nobody need watch it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from deeploop.runs import checkpoint
from deeploop.train import stop
from deeploop.train.setup import open_run
from deeploop.train.stop import stop_signals


@pytest.fixture
def unchecked(monkeypatch):
    """Leave out the forward before a save, so that validations run the only ones in eval mode."""
    monkeypatch.setattr("deeploop.train.language.stream_is_finite", lambda *_: torch.tensor(True))


def signal_in_validation(trainer, sent):
    """Send a signal to this process in the first forward of a validation; list its forwards."""
    forwards = []

    def note(module, *_):
        if not module.training:
            forwards.append(trainer.done)
            if len(forwards) == 1:
                os.kill(os.getpid(), sent)

    trainer.model.register_forward_hook(note)
    return forwards


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("sent", "steps"), [(signal.SIGINT, 20), (signal.SIGTERM, 5), (signal.SIGHUP, 20)]
)
def test_a_validation_ends_at_a_signal_without_a_figure(
    config, quiet, tmp_path, capfd, unchecked, sent, steps
):
    changes = {"steps": steps, "eval_every": 5, "eval_tokens": 0, "micro_batch": 1}
    trainer = open_run(config.replace("train", save_every=5, **changes), quiet)
    forwards = signal_in_validation(trainer, sent)
    summary = trainer.fit()
    assert summary["stopped_by"] == sent.name and summary["step"] == 5
    assert forwards == [5]  # one batch, and no sample
    assert not any("val_loss" in line for line in lines(tmp_path / "run"))
    assert checkpoint.find(str(tmp_path / "run")).step == 5
    printed = capfd.readouterr().err
    assert printed.startswith(f"{sent.name}: stopping after this step") and printed.count("\n") == 1


def test_steps_are_saved_before_they_are_validated(config, quiet, tmp_path, unchecked):
    trainer = open_run(config.replace("train", steps=10, save_every=5, eval_every=5), quiet)
    newest = []
    trainer.model.register_forward_hook(
        lambda module, *_: module.training or newest.append(checkpoint.steps(tmp_path / "run"))
    )
    trainer.run_steps()
    trainer.lock.close()
    assert {folders[-1].name for folders in newest} == {"step_000005", "step_000010"}


def test_a_finished_run_whose_validation_was_stopped_is_validated_by_a_resume(
    config, quiet, tmp_path
):
    config = config.replace("train", steps=5, eval_every=0)
    trainer = open_run(config, quiet)
    signal_in_validation(trainer, signal.SIGTERM)
    assert "stopped_by" in trainer.fit()
    summary = open_run(config, quiet, checkpoint.find(str(tmp_path / "run"))).fit()
    assert summary["val_loss"] > 0 and lines(tmp_path / "run")[-1]["val_loss"]


def test_a_signal_after_the_last_validation_leaves_a_whole_summary(config, quiet):
    trainer = open_run(config.replace("train", steps=5), quiet)
    say = trainer.console.print

    def interrupted(text, **options):
        say(text, **options)
        if "held-out" in text:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer.console.print = interrupted
    summary = trainer.fit()
    assert "stopped_by" not in summary and summary["val_loss"] > 0


def test_a_closed_terminal_that_nohup_ignores_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals("this step", announce=False) as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not received
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_counts_once_the_first_is_old(monkeypatch):
    """torchrun and timeout send two at once, which are one wish."""
    with stop_signals("this step", announce=False) as received:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGINT, signal.SIGINT]
        monkeypatch.setattr(stop, "PATIENCE", -1.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)  # in which the signal arrives


def wait_until(condition, process, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None and not condition():
        time.sleep(0.05)
    assert condition(), process.stderr.read()


def test_ctrl_c_saves_where_the_reader_of_the_output_has_gone(config, tmp_path):
    """As after `deeploop train | tee log`, whose tee the same Ctrl-C ends."""
    text = "".join(f"line {i % 7}: the quick brown fox {i}\n" for i in range(20000))
    (tmp_path / "long.txt").write_text(text)
    flags = [
        "--data", tmp_path / "long.txt", "--data.val-fraction", "0.9", "--out", tmp_path / "run",
        "--model.d-model", "16", "--model.n-heads", "2", "--model.loops", "2",
        "--model.seq-len", "16", "--train.batch-size", "1", "--train.eval-tokens", "0",
        "--train.eval-every", "2", "--train.save-every", "0", "--train.log-every", "1",
    ]  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "deeploop.cli", "train", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.readline().startswith("model")
    process.stdout.close()  # the prints of all that follows fail
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
    time.sleep(0.3)  # step 2 is validated: 38,000 batches, minutes
    process.send_signal(signal.SIGINT)
    process.stdout = None
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130, printed
    heard, hint = printed.splitlines()
    assert heard.startswith("SIGINT: stopping") and hint.endswith(f"--resume {tmp_path / 'run'}")
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]
    assert checkpoint.find(str(tmp_path / "run")).step == 2


def test_validation_of_ranks_asks_each_other_once_a_round(config, quiet, monkeypatch):
    """Every rank asks equally often, with one batch of its own or none in the last round."""
    from deeploop.eval.validate import validate
    from deeploop.utils.distributed import Ranks

    asked = []

    class Alone(Ranks):
        def any_rank(self, flag):
            asked.append(self.rank)
            return flag

        def all_reduce_(self, tensors):
            pass

    trainer = open_run(config, quiet)
    for rank in range(2):
        validate(trainer.model, trainer.corpus, 1, "fp32", 16 * 5, Alone(rank, 2))
    trainer.lock.close()
    assert asked == [0, 0, 1, 1]
    assert torch.is_grad_enabled()
