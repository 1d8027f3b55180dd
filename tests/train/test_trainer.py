"""The trainer: what a run leaves, exact resume, accumulation, refusals, signals."""

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from deeploop.cli import main
from deeploop.runs import checkpoint
from deeploop.train.optim import learning_rate
from deeploop.train.setup import open_run
from deeploop.train.trainer import Trainer, due
from deeploop.utils.errors import Diverged, InputError


def weights(folder):
    found = checkpoint.find(str(folder))
    state = torch.load(found.path / "optimizer.pt", weights_only=True)
    moments = [v for s in state["state"].values() for v in s.values()]
    return [*load_file(found.path / "model.safetensors").values(), *moments]


def assert_same_bits(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def test_a_run_learns_and_leaves_what_it_promises(config, quiet, tmp_path):
    summary = open_run(config, quiet).fit()
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} == {
        "checkpoints", "config.json", "corpus.json", "loops.png", "loss.png", "metrics.jsonl",
        "summary.json",
    }  # fmt: skip
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [m["loss"] for m in lines if "loss" in m]
    assert [m["step"] for m in lines if "loss" in m] == [5, 10, 15, 20]
    assert [m["step"] for m in lines if "val_loss" in m] == [10, 20]
    rates = [learning_rate(step - 1, config.train) for step in (5, 10, 15, 20)]
    assert [m["lr"] for m in lines if "loss" in m] == rates
    assert losses[-1] < losses[0]
    assert all(len(m["residual_rms"]) == 2 for m in lines if "loss" in m)
    assert json.loads((run / "summary.json").read_text()) == summary
    assert summary["val_bits_per_byte"] == pytest.approx(summary["val_loss"] / math.log(2))
    assert summary["tokens_per_second"] > 0 and len(summary["sample"]) > 16
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((run / "config.json").read_text())
    assert saved["model"]["vocab_size"] == 256


@pytest.mark.parametrize("micro_batch", [0, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_is_exact(config, quiet, tmp_path, micro_batch, precision):
    """20 steps = 10 steps + resume + 10 steps, to the bit, moments too."""
    config = config.replace("train", micro_batch=micro_batch, precision=precision)
    open_run(config, quiet).fit()
    straight = weights(tmp_path / "run")
    half = checkpoint.find(str(tmp_path / "run" / "checkpoints" / "step_000010"))
    fork = half.config.replace("train", out=str(tmp_path / "fork"))
    trainer = open_run(fork, quiet, half)
    assert trainer.done == 10
    trainer.fit()
    assert_same_bits(weights(tmp_path / "fork"), straight)


def test_resume_in_place_rewrites_only_what_came_after(config, quiet, tmp_path):
    config = config.replace("train", save_every=5, keep=0)
    open_run(config, quiet).fit()
    straight, run = weights(tmp_path / "run"), tmp_path / "run"
    before = (run / "metrics.jsonl").read_text().splitlines()
    for step in ("15", "20"):
        (run / "checkpoints" / f"step_0000{step}").rename(tmp_path / step)
    open_run(config, quiet, checkpoint.find(str(run))).fit()
    after = (run / "metrics.jsonl").read_text().splitlines()
    assert after[:3] == before[:3] and len(after) == len(before)
    assert_same_bits(weights(run), straight)


def test_two_runs_are_the_same_and_the_seed_matters(config, quiet, tmp_path):
    results, first = [], []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        out = tmp_path / name
        trainer = open_run(config.replace("train", out=str(out), seed=seed), quiet)
        first.append((trainer.batch()[0], trainer.model.embed_tokens.weight.detach().clone()))
        trainer.fit()
        results.append(weights(out))
    assert_same_bits(results[0], results[1])
    # of the data order and of the weights
    assert not any(torch.equal(a, b) for a, b in zip(first[0], first[2], strict=True))


def test_accumulation_equals_the_whole_batch(config, quiet, tmp_path):
    gradients = []
    for micro in (0, 1, 3):  # 3 leaves a ragged last micro-batch
        run = config.replace("train", micro_batch=micro, out=str(tmp_path / str(micro)), clip=0.0)
        trainer = open_run(run, quiet)
        trainer.model.double()
        trainer.optimizer.zero_grad = lambda set_to_none: None
        metrics = trainer.step()
        gradients.append([metrics.total_loss(), *(p.grad for p in trainer.model.parameters())])
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def test_a_step_clips_and_takes_the_rate_of_its_place(config, quiet):
    trainer = open_run(config.replace("train", clip=1e-3, warmup=0.5), quiet)
    trainer.optimizer.zero_grad = lambda set_to_none: None
    trainer.done = 4
    before = trainer.step(observe=False).grad_norm
    after = torch.nn.utils.get_total_norm([p.grad for p in trainer.model.parameters()])
    assert before > 1e-2 and after == pytest.approx(1e-3, rel=1e-2)
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert rates == {learning_rate(4, trainer.config.train)}


def test_no_forward_is_larger_than_a_micro_batch(config, quiet):
    """Validation included: micro_batch is what fits the device."""
    trainer = open_run(config.replace("train", micro_batch=2, steps=1), quiet)
    rows = []
    trainer.model.embed_tokens.register_forward_hook(lambda _, args, out: rows.append(len(args[0])))
    trainer.fit()
    assert max(rows) == 2


def test_old_checkpoints_are_pruned_newest_kept(config, quiet, tmp_path):
    open_run(config.replace("train", save_every=4, keep=2), quiet).fit()
    assert [p.name for p in checkpoint.steps(tmp_path / "run")] == ["step_000016", "step_000020"]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(config, quiet, tmp_path):
    trainer = open_run(config, quiet)
    whole_step = trainer.step

    def poisoned(**options):
        if trainer.done == 12:
            trainer.model.sublayers[1].branch.out.weight.data[0, 0] = math.nan
        return whole_step(**options)

    trainer.step = poisoned
    with pytest.raises(Diverged, match=r"loop 1, sublayer 2 \(SwiGLU\).*step_000010"):
        trainer.fit()
    assert [p.name for p in checkpoint.steps(tmp_path / "run")] == ["step_000010"]
    assert all(torch.isfinite(w).all() for w in weights(tmp_path / "run"))


def test_a_held_out_loss_that_is_not_finite_is_an_ending_and_not_a_figure(
    config, quiet, tmp_path, monkeypatch
):
    trainer = open_run(config.replace("train", eval_tokens=0), quiet)
    whole = trainer.model.forward

    def overflowing(inputs, **options):
        n = whole(inputs, **options)
        return n if trainer.model.training else n * math.inf

    monkeypatch.setattr(trainer.model, "forward", overflowing)
    with pytest.raises(Diverged, match=r"held-out loss is not finite at step 10, .*step_000010"):
        trainer.fit()
    lines = [json.loads(x, parse_constant=pytest.fail)
             for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]  # fmt: skip
    assert lines[-1] == {"step": 10, "val_loss": None, "val_bits_per_byte": None}
    assert not (tmp_path / "run" / "summary.json").exists()


def test_an_existing_run_is_not_written_over(config, quiet, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("precious")
    with pytest.raises(InputError, match=r"train\.out=.*already exists"):
        open_run(config, quiet)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "d_model", 32),
        ("model", "residual", "pre_norm"),
        ("model", "loops", 3),
        ("model", "seq_len", 8),
        ("train", "batch_size", 5),
        ("train", "seed", 9),
    ],
)
def test_a_checkpoint_of_another_config_is_refused(config, quiet, finished, part, name, value):
    with pytest.raises(InputError, match=rf"{part}\.{name}={value}: the checkpoint"):
        open_run(config.replace(part, **{name: value}), quiet, finished)


def test_resume_may_train_for_longer_but_not_shorter(config, quiet, finished):
    assert open_run(config.replace("train", steps=25), quiet, finished).fit()["step"] == 25
    found = checkpoint.find(config.train.out)
    with pytest.raises(InputError, match=r"train\.steps=24.*already at step 25"):
        open_run(config.replace("train", steps=24), quiet, found)


def test_a_corpus_that_changed_under_a_run_is_refused(config, quiet, corpus_file, finished):
    corpus_file.write_text(corpus_file.read_text() + "more\n" * 100)
    with pytest.raises(InputError, match="changed since"):
        open_run(config, quiet, finished)


def test_a_vocabulary_smaller_than_the_corpus_is_refused(config, quiet):
    with pytest.raises(InputError, match="100"):
        open_run(config.replace("model", vocab_size=100), quiet).fit()


def test_a_text_shorter_than_a_sequence_is_refused(config, quiet, corpus_file, tmp_path):
    corpus_file.write_text("0123456789" * 2)  # 18 train, and a window is 17 at seq_len 16
    with pytest.raises(InputError, match="fewer than one sequence"):
        open_run(config.replace("model", seq_len=18), quiet)
    assert not (tmp_path / "run").exists()


def test_text_of_the_same_length_is_another_corpus(config, quiet, corpus_file, finished):
    corpus_file.write_text(corpus_file.read_text().replace("quick", "quack"))
    with pytest.raises(InputError, match="changed since"):
        open_run(config, quiet, finished)


def test_an_older_checkpoint_does_not_go_on_in_place(config, quiet, tmp_path, finished):
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    older = checkpoint.find(str(tmp_path / "run" / "checkpoints" / "step_000010"))
    with pytest.raises(InputError, match=r"already at step_000020.*--out"):
        open_run(config, quiet, older)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_a_finished_run_may_be_resumed_anywhere(config, quiet, tmp_path, monkeypatch, finished):
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    fork = config.replace("train", out=str(tmp_path / "fork"))
    assert open_run(fork, quiet, finished).fit()["val_loss"] == summary["val_loss"]
    monkeypatch.chdir(finished.path)  # the same folder by another name
    again = open_run(config, quiet, checkpoint.find("."))
    assert again.folder == tmp_path / "run" and again.fit()["val_loss"] == summary["val_loss"]


def test_what_cannot_start_leaves_no_folder(config, quiet, tmp_path, monkeypatch, finished):
    fork = config.replace("train", out=str(tmp_path / "fork"))
    (tmp_path / "run" / "checkpoints" / "step_000020" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(InputError, match=r"optimizer\.pt is damaged"):
        open_run(fork, quiet, checkpoint.find(config.train.out))
    assert not (tmp_path / "fork").exists()

    def full(*_):
        (tmp_path / "fork" / "config.json").write_text("{")
        raise InputError("full")

    monkeypatch.setattr("deeploop.train.setup.write_run_files", full)
    with pytest.raises(InputError, match="full"):
        open_run(fork, quiet)
    assert not (tmp_path / "fork").exists()


def test_one_process_a_folder(config, quiet, tmp_path):
    first = open_run(config, quiet)
    with pytest.raises(InputError, match=r"already exists|another process"):
        open_run(config, quiet)
    first.fit()
    found = checkpoint.find(config.train.out)
    second = open_run(config.replace("train", steps=25), quiet, found)
    with pytest.raises(InputError, match="another process"):
        open_run(config.replace("train", steps=25), quiet, found)
    assert second.fit()["step"] == 25


def test_damaged_metrics_are_refused_and_kept(config, quiet, tmp_path, finished):
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(b"\xff" + metrics.read_bytes())
    before = metrics.read_bytes()
    with pytest.raises(InputError, match="line 1: is not readable"):
        open_run(config, quiet, finished).fit()
    assert metrics.read_bytes() == before


def test_a_compiler_that_is_not_there_is_refused(config, quiet, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(InputError, match=r"train\.compile.*/nowhere/g\+\+"):
        open_run(config.replace("train", compile=True), quiet)
    assert not (tmp_path / "run").exists()


def test_due():
    assert [s for s in range(1, 8) if due(s, 3, 7)] == [3, 6, 7]
    assert [s for s in range(1, 8) if due(s, 0, 7)] == [7]


def flags(config, save_every):
    return [
        "--data", config.data.path, "--out", config.train.out, "--model.d-model", "16",
        "--model.n-heads", "2", "--model.loops", "2", "--model.seq-len", "16",
        "--train.batch-size", "4", "--train.precision", "fp32", "--train.eval-tokens", "64",
        "--train.save-every", str(save_every), "--train.eval-every", "0",
    ]  # fmt: skip


def test_a_signal_saves_and_says_how_to_go_on(config, tmp_path, capsys, monkeypatch):
    """Here in a process that goes on; `test_stop` sends one to a process of its own."""
    sent, step = signal.SIGTERM, Trainer.step

    def interrupted(trainer, *args, **kwargs):
        if trainer.done == 4:
            os.kill(os.getpid(), sent)
        return step(trainer, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert main(["train", *flags(config, 0), "--steps", "3000"]) == 128 + sent
    assert f"deeploop train --resume {tmp_path / 'run'}" in capsys.readouterr().err
    found = checkpoint.find(str(tmp_path / "run"))
    assert found.step == 5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stopped_by"] == sent.name and summary["step"] == found.step


def test_a_kill_loses_no_checkpoint(config, tmp_path):
    """Killed in the middle of saving, again and again, the newest one is always whole."""
    process = subprocess.Popen(
        [sys.executable, "-m", "deeploop.cli", "train", *flags(config, 1), "--steps", "100000"],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(checkpoint.steps(tmp_path / "run")) < 2:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert weights(tmp_path / "run")
