"""The Python interface: names of `deeploop`, and a training loop of one's own."""

import runpy
import subprocess
import sys

import pytest
import torch

import deeploop
from deeploop.train.optim import learning_rate, make_optimizer
from deeploop.train.step import train_step
from deeploop.utils.errors import InputError


def test_import_loads_nothing_else():
    script = (
        "import sys, deeploop\n"
        "heavy = {'torch', 'numpy', 'rich', 'tyro', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("module", ["deeploop", "deeploop.cli"])
def test_the_package_runs_as_a_module(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(module, run_name="__main__")
    assert stop.value.code == 0 and capsys.readouterr().out == f"{deeploop.__version__}\n"


def test_every_name_is_there_and_no_other():
    assert all(getattr(deeploop, name) is not None for name in deeploop.__all__)
    assert set(deeploop.__all__) < set(dir(deeploop))
    with pytest.raises(AttributeError, match="zzz"):
        _ = deeploop.zzz


def test_train_load_and_generate(config, tmp_path):
    trainer = deeploop.Trainer.open(config.replace("train", steps=10))
    summary = trainer.fit()
    model = deeploop.load(str(tmp_path / "run"))
    assert isinstance(model, deeploop.LoopLM) and not model.training
    (text,) = deeploop.generate(str(tmp_path / "run"), "line", tokens=5, loops=3, device="cpu")
    assert text.startswith("line")
    longer = config.replace("train", steps=12)
    resumed = deeploop.Trainer.open(longer, resume=str(tmp_path / "run"))
    assert resumed.done == 10 and resumed.fit()["step"] == 12
    assert summary["step"] == 10
    with pytest.raises(InputError, match="no such folder"):
        deeploop.load(str(tmp_path / "nothing"))


def test_a_training_loop_of_ones_own():
    """The loop that deeploop/README.md shows: ten lines, and it learns its batch by heart."""
    config = deeploop.preset("deeploop-tiny").replace("model", vocab_size=16, d_model=48)
    config = config.replace("train", precision="fp32", batch_size=4, steps=30, lr=1e-2)
    torch.manual_seed(0)
    model = deeploop.LoopLM(config.model)
    optimizer = make_optimizer(model, config.train)
    tokens = torch.randint(0, 16, (4, config.model.seq_len + 1))
    losses = []
    for step in range(config.train.steps):
        lr = learning_rate(step, config.train)
        metrics = train_step(model, optimizer, config, [(tokens[:, :-1], tokens[:, 1:])], lr)
        losses.append(float(metrics.total_loss()))
    assert losses[-1] < 0.9 * losses[0] and not metrics.nonfinite
