"""A checkpoint is saved only where all that it holds is finite; good ones outlive a bad step."""

import math

import pytest
import torch

from deeploop.runs import checkpoint
from deeploop.train.finite import first_nonfinite, state_is_finite, stream_is_finite
from deeploop.train.setup import open_run
from deeploop.utils.errors import Diverged
from tests.helpers.checkpoints import trained_once


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["weight embed_tokens.weight", "exp_avg_sq of norm_final.weight"])
def test_one_value_of_a_weight_or_moment_is_noticed(name, bad):
    _, model, optimizer = trained_once()
    assert state_is_finite(model, optimizer) and first_nonfinite(model, optimizer) is None
    if name.startswith("weight"):
        model.embed_tokens.weight.data[3, 5] = bad
    else:
        optimizer.state[model.norm_final.weight]["exp_avg_sq"][2] = bad
    assert not state_is_finite(model, optimizer)
    assert first_nonfinite(model, optimizer) == name


def test_the_largest_float_is_finite():
    _, model, optimizer = trained_once()
    model.embed_tokens.weight.data.fill_(3e38)
    assert state_is_finite(model, optimizer)


def test_a_stream_that_overflows_is_noticed():
    _, model, _ = trained_once()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    assert stream_is_finite(model, tokens) and model.training
    for sublayer in model.sublayers:
        sublayer.branch.out.weight.data.fill_(math.inf)
    assert not stream_is_finite(model, tokens)


RUINS = {
    "weight embed_tokens.weight": lambda model: model.embed_tokens.weight.data[255].fill_(math.nan),
    "the residual stream": lambda model: model.sublayers[1].branch.out.weight.data.fill_(1e38),
}


@pytest.mark.parametrize("named", RUINS)
def test_a_step_that_ruins_the_state_is_not_saved(config, quiet, tmp_path, named):
    """Nor does it cost the checkpoint before it, with room for one. Byte 255 is not in the text."""
    config = config.replace("train", save_every=1, keep=1, eval_every=0, log_every=100)
    trainer = open_run(config.replace("model", residual="pre_norm"), quiet)
    whole_step = trainer.step

    def ruins(**options):
        metrics = whole_step(**options)
        if trainer.done == 3:
            RUINS[named](trainer.model)
        return metrics

    trainer.step = ruins
    with pytest.raises(Diverged, match=rf"{named} is not finite.*step_000002"):
        trainer.fit()
    assert [p.name for p in checkpoint.steps(tmp_path / "run")] == ["step_000002"]


def test_a_rate_beyond_all_measure_ends_the_run(config, quiet, tmp_path):
    config = config.replace("train", save_every=1, keep=1, lr=1e38, eval_every=0)
    with pytest.raises(Diverged):
        open_run(config, quiet).fit()
    assert checkpoint.steps(tmp_path / "run") == []
