"""Runs on a task: what they log, exact resume, the loss's mean over targets, refusals."""

import json

import pytest
import torch

from deeploop.cli import main
from deeploop.config import Config, DataConfig, ModelConfig, TrainConfig
from deeploop.data.batches import IGNORE
from deeploop.eval.generate import generate
from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError
from tests.train.test_trainer import assert_same_bits, weights


@pytest.fixture
def config(tmp_path) -> Config:
    """A run of three steps on sums of numbers with 1 to 3 digits; targets differ in number."""
    return Config(
        preset="test",
        model=ModelConfig(d_model=16, n_layers=1, loops=2, n_heads=2, seq_len=16),
        data=DataConfig(task="addition", difficulty="1-3", eval_difficulty="4"),
        train=TrainConfig(
            steps=3, batch_size=5, precision="fp32", device="cpu", log_every=1, eval_every=0,
            eval_tokens=100, save_every=1, keep=0, out=str(tmp_path / "run"),
        ),
    )  # fmt: skip


def test_a_run_logs_the_accuracy_and_leaves_no_text(config, quiet, tmp_path):
    trainer = open_run(config, quiet)
    summary = trainer.fit()
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["val_bits_per_byte"] is None and summary["sample"] is None
    for figures in (lines[-1], summary):
        assert 0 <= figures["val_accuracy"] <= figures["val_token_accuracy"] <= 1
    assert summary["val_tokens"] == 100 and trainer.config.model.vocab_size == 13
    facts = json.loads((tmp_path / "run" / "corpus.json").read_text())
    assert facts["task"] == "addition" and facts["tokenizer"] is None
    assert list(facts["floors_nats_per_token"]) == ["guessing"]
    with pytest.raises(InputError, match="task addition, whose ids stand for no text"):
        generate(config.train.out, "1 + 1")


@pytest.mark.parametrize("micro_batch", [0, 2])
def test_the_loss_is_a_mean_over_the_targets(config, quiet, micro_batch):
    """The same for any micro-batch, and as large as the cross-entropy of the answers alone."""
    trainer = open_run(config.replace("train", micro_batch=micro_batch), quiet)
    inputs, targets = trainer.batch()
    assert len(set((targets != IGNORE).sum(1).tolist())) > 1
    logits = trainer.model.logits(trainer.model(inputs))
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    plain.backward()
    norm = torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm()
    trainer.model.zero_grad()
    figures = trainer.step(observe=True).figures()
    assert figures["loss"] == pytest.approx(plain.item(), rel=1e-5)
    assert figures["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_resume_is_exact(config, quiet, tmp_path):
    open_run(config, quiet).fit()
    first = checkpoint.find(str(tmp_path / "run" / "checkpoints" / "step_000001"))
    fork = first.config.replace("train", out=str(tmp_path / "fork"), micro_batch=2)
    fork = fork.replace("data", eval_difficulty="2")  # may change
    assert open_run(fork.replace("train", micro_batch=0), quiet, first).fit()["step"] == 3
    assert_same_bits(weights(tmp_path / "fork"), weights(tmp_path / "run"))


def test_other_examples_than_before_are_refused(config, quiet, tmp_path, monkeypatch):
    open_run(config.replace("train", steps=1), quiet).fit()
    found = checkpoint.find(str(tmp_path / "run"))
    more = found.config.replace("train", steps=2)
    with pytest.raises(InputError, match=r"data\.difficulty=1-4.*1-3"):
        open_run(more.replace("data", difficulty="1-4"), quiet, found)
    with pytest.raises(InputError, match=r"data\.task=parity.*trained with addition"):
        open_run(more.replace("data", task="parity"), quiet, found)
    monkeypatch.setattr("deeploop.data.tasks.draw._GOLDEN", 3)
    with pytest.raises(InputError, match=r"addition has other examples.*without --resume"):
        open_run(more, quiet, found)


def test_the_command_line_trains_a_task_and_reports_it(tmp_path, capsys):
    command = ["train", "--data.task", "parity", "--data.difficulty", "1-2", "--steps", "2"]
    sizes = [
        "--model.d-model", "16", "--model.n-heads", "2", "--train.batch-size", "2",
        "--train.eval-tokens", "64", "--train.out", str(tmp_path / "run"),
    ]  # fmt: skip
    assert main([*command, *sizes]) == 0
    printed = capsys.readouterr().out
    assert "parity: difficulty 1-2 in training, 16 in" in printed
    assert "nats/answer, accuracy" in printed and "guessing 0.693" in printed
    assert main([*command, "--data", "a.txt"]) == 2


def test_a_run_on_a_task_is_diagnosed_and_profiled(config, quiet, tmp_path):
    from deeploop.analyze.diagnose.diagnose import diagnose
    from deeploop.analyze.profile.profile import Steps, open_profile
    from deeploop.utils.distributed import Ranks

    (reading,) = diagnose(config.replace("train", out=str(tmp_path / "d")), [], quiet, probes=1)
    assert 2 < reading["loss"] < 3  # about ln 13: a mean over the answers alone
    out = config.replace("train", out=str(tmp_path / "p"))
    assert open_profile(out, Steps(1, 1, 1), quiet, Ranks()).corpus.name == "addition"
