"""A residual rule from outside the package runs through all of it, with no edit elsewhere."""

import dataclasses

import pytest
import torch

from deeploop.analyze.diagnose.diagnose import diagnose
from deeploop.analyze.plan.planner import estimate, target_of
from deeploop.config.model import RESIDUALS, ResidualChoice
from deeploop.model.looplm import LoopLM
from deeploop.runs import checkpoint
from deeploop.train.describe import describe
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError
from tests.helpers.plain_model import check_gradients, scattered


@pytest.fixture
def ouro(config, monkeypatch):
    """A run of a second under the new rule, with a block before and one after the loops."""
    choice = ResidualChoice("tests.helpers.ouro_rule:OuroRule")
    monkeypatch.setitem(RESIDUALS, "ouro-test", choice)
    return config.replace("model", residual="ouro-test", prelude=1, coda=1)


def test_the_model_is_its_reference(ouro):
    torch.manual_seed(0)
    m = dataclasses.replace(ouro.model, vocab_size=31)
    x = torch.randint(0, 31, (2, m.seq_len), generator=torch.Generator().manual_seed(1))
    check_gradients(scattered(LoopLM(m)), x, rtol=1e-8, atol=1e-10)


def test_cache_on_equals_cache_off(ouro):
    torch.manual_seed(0)
    model = scattered(LoopLM(dataclasses.replace(ouro.model, vocab_size=31)))
    x = torch.randint(0, 31, (2, 16), generator=torch.Generator().manual_seed(1))
    for loops in (1, 2, 4):
        cache = model.new_cache(batch=2, max_len=16, loops=loops)
        outputs = [model(chunk, loops=loops, cache=cache) for chunk in x.split([5, 1, 1, 9], dim=1)]
        whole = model(x, loops=loops)
        torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backprop", ["full", "segments", "last"])
def test_it_trains_and_resumes_to_the_bit(ouro, quiet, tmp_path, backprop):
    if backprop == "last":  # which would give a prelude no gradient
        ouro = ouro.replace("model", prelude=0)
    config = ouro.replace("train", backprop=backprop, backprop_loops=1, lr=1e-2)
    trainer = open_run(config, quiet)
    assert "ouro-test" in describe(trainer)[0] and "peri-norm" in describe(trainer)[0]
    summary = trainer.fit()
    assert summary["val_loss"] < 4  # log 256 is 5.5
    half = checkpoint.find(str(tmp_path / "run" / "checkpoints" / "step_000010"))
    resumed = open_run(half.config.replace("train", out=str(tmp_path / "fork")), quiet, half)
    assert resumed.fit()["val_loss"] == summary["val_loss"]


def test_it_is_planned_and_diagnosed(ouro, quiet, tmp_path):
    e = estimate(ouro.replace("train", precision="fp32"), target_of("h200"))
    plain = estimate(
        ouro.replace("train", precision="fp32").replace("model", prelude=0, coda=0),
        target_of("h200"),
    )
    assert e.parameters > plain.parameters and e.memory.peak > plain.memory.peak
    readings = diagnose(ouro.replace("train", out=str(tmp_path / "x")), [], quiet, probes=1)
    assert readings[0]["kappa"] > 0 and len(readings[0]["branches"]) == 2


@pytest.mark.parametrize("backprop", ["full", "segments", "last"])
@pytest.mark.parametrize("residual", ["ouro-test", "deeploop", "loom"])
def test_every_parameter_is_trained_or_the_run_refused(ouro, quiet, residual, backprop):
    config = ouro.replace("model", residual=residual)
    config = config.replace("train", backprop=backprop, backprop_loops=1)
    if backprop == "last" and residual != "loom":
        with pytest.raises(InputError, match=r"model\.prelude=1: gets no gradient"):
            open_run(config, quiet)
        return
    trainer = open_run(config, quiet)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.step()
    same = [n for n, p in trainer.model.named_parameters() if torch.equal(p, before[n])]
    trainer.lock.close()
    assert not same
