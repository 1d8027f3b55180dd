"""Files of older versions: their names of fields, values and weights load as today's."""

import json

import pytest

from deeploop.config import Config
from deeploop.config.renames import renamed_weights
from deeploop.utils.errors import InputError


def old(**train):
    """A configuration as version 0.1.0 of 2026-11 wrote it."""
    values = json.loads(Config().to_json())
    model, t = values["model"], values["train"]
    del model["residual"], model["prelude"], model["coda"]
    del t["backprop"], t["backprop_loops"]
    model |= {"arm": "baseline"}
    model["moe"]["backend"] = "loop"
    t |= {"plan": "segments", "plan_loops": 2} | train
    return json.dumps(values)


def test_an_old_configuration_is_todays():
    config = Config.from_json(old())
    wanted = Config().replace("model", residual="pre_norm")
    wanted = wanted.replace("model.moe", backend="reference")
    assert config == wanted.replace("train", backprop="segments", backprop_loops=2)


def test_a_field_that_never_was_is_refused():
    with pytest.raises(InputError, match="zzz"):
        Config.from_json(old(zzz=1))


def test_old_weights_get_todays_keys():
    keys = {
        "embedding.weight": "embed_tokens.weight",
        "untied.weight": "lm_head.weight",
        "gain_embedding": "norm_embed.weight",
        "gain_final": "norm_final.weight",
        "sublayers.0.gain_in": "sublayers.0.norm_in.weight",
        "sublayers.13.gain_out": "sublayers.13.norm_out.weight",
        "sublayers.0.branch.qkv.weight": "sublayers.0.branch.qkv.weight",
    }
    assert renamed_weights({k: k for k in keys}) == {new: k for k, new in keys.items()}
    assert renamed_weights({k: k for k in keys.values()}) == {k: k for k in keys.values()}


def test_old_and_new_name_at_once_are_refused():
    for extra in ({"backprop": "full"}, {"backprop_loops": 3}):
        with pytest.raises(InputError, match=r"train\.backprop.*given twice"):
            Config.from_json(old(**extra))
    with pytest.raises(InputError, match=r"embed_tokens\.weight: stored twice"):
        renamed_weights({"embedding.weight": 0, "embed_tokens.weight": 0})
