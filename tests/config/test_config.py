import dataclasses
import functools
import json

import pytest

from deeploop.config import (
    Config,
    DataConfig,
    LoomConfig,
    ModelConfig,
    MoEConfig,
    TrainConfig,
)
from deeploop.config.fields import entries
from deeploop.config.model import MAX_EXPERTS
from deeploop.config.presets import preset, presets
from deeploop.kernels.sigmoid_router import MAX_EXPERTS as sigmoid_router_limit
from deeploop.utils.errors import InputError


@pytest.mark.parametrize("name", presets())
def test_json_round_trip(name):
    config = preset(name)
    assert Config.from_json(config.to_json()) == config


def test_unknown_and_missing_keys_are_refused():
    raw = json.loads(Config().to_json())
    raw["model"]["width"] = 3
    with pytest.raises(InputError, match="width"):
        Config.from_json(json.dumps(raw))
    del raw["model"]
    with pytest.raises(InputError, match="model"):
        Config.from_json(json.dumps(raw))


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "loops", 0),
        ("model", "loops", -1),
        ("model", "n_layers", 0),
        ("model", "d_model", 0),
        ("model", "seq_len", 0),
        ("model", "vocab_size", -1),
        ("model", "norm_eps", 0.0),
        ("model", "rope_base", float("nan")),
        ("model", "n_heads", 5),
        ("model", "n_heads", 128),
        ("model", "p", 3.0),
        ("model", "p", float("nan")),
        ("train", "steps", 0),
        ("train", "batch_size", 0),
        ("train", "micro_batch", 17),
        ("train", "lr", 0.0),
        ("train", "lr", float("inf")),
        ("train", "clip", -1.0),
        ("train", "warmup", 1.5),
        ("train", "warmup", 0.95),
        ("train", "beta2", 1.0),
        ("train", "log_every", 0),
        ("train", "keep", -1),
        ("train", "backprop_loops", 0),
        ("data", "val_fraction", 1.0),
        ("model.moe", "experts", -1),
        ("model.moe", "top_k", 0),
        ("model.moe", "capacity_factor", -0.5),
        ("model.moe", "z_loss", float("inf")),
        ("model.loom", "strength", 0.0),
        ("model.loom", "strength", 1e308),
        ("train", "lr", 10**400),
        ("model.moe", "experts", 513),
        ("model.loom", "decay", 1.0),
    ],
)
def test_impossible_values_are_refused_by_name_and_value(part, name, value):
    config = Config()
    with pytest.raises(InputError) as refused:
        config.replace(part, **{name: value})
    assert f"{part}.{name}={value}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_exponent_needs_a_rule_that_has_one():
    with pytest.raises(InputError, match=r"model\.p=0\.4.*model\.residual=pre_norm"):
        Config(model=ModelConfig(residual="pre_norm", p=0.4))


def test_ff_width_is_eight_thirds_in_multiples_of_64():
    assert ModelConfig(d_model=768).ff_width == 2048
    assert ModelConfig(d_model=1024, n_heads=4).ff_width == 2752
    assert ModelConfig(d_model=64, n_heads=2).ff_width == 192
    assert ModelConfig(d_model=64, n_heads=2, d_ff=100).ff_width == 100


def test_micro_batches_default_to_the_batch():
    assert TrainConfig().micro_batch == 0


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "loops", "4"), ("model", "loops", 2.0), ("model", "loops", True),
        ("model", "loops", 2**31), ("model", "residual", "zzz"), ("model", "p", "x"),
        ("model", "qk_norm", 1), ("data", "path", 5), ("train", "lr", None),
        ("train", "seed", 2**63), ("train", "backprop", "half"), ("model", "moe", None),
        ("model.moe", "backend", "zzz"), ("model.loom", "injection", 1),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused(part, name, value):
    raw = json.loads(Config().to_json())
    place = raw
    for step in part.split("."):
        place = place[step]
    place[name] = value
    with pytest.raises(InputError, match=rf"{part}\.{name}={value!r}: must be"):
        Config.from_json(json.dumps(raw))


def test_every_number_but_the_free_exponent_has_a_limit():
    """So that a field added later is checked at the door, too."""
    for entry in entries(Config()):
        if entry.type in (int, float):
            assert entry.limit is not None, entry.name


def test_as_many_experts_as_the_router_takes():
    """The number stands twice, for the configuration must not import torch."""
    assert sigmoid_router_limit == MAX_EXPERTS


@pytest.mark.parametrize(
    ("section", "values", "sentence"),
    [
        (ModelConfig, {"residual": "Deeploop"}, "model.residual='Deeploop': must be one of pre_n"),
        (ModelConfig, {"d_model": 65, "n_heads": 2}, "model.n_heads=2: must divide model.d_model"),
        (ModelConfig, {"d_model": 64.5}, "model.d_model=64.5: must be an integer"),
        (ModelConfig, {"loops": "4"}, "model.loops='4': must be an integer"),
        (ModelConfig, {"loops": True}, "model.loops=True: must be an integer"),
        (ModelConfig, {"loops": 0}, "model.loops=0: must be greater than 0"),
        (ModelConfig, {"moe": {"experts": 4}}, "model.moe={'experts': 4}: must be a group of"),
        (ModelConfig, {"residual": "pre_norm", "p": 0.4}, "model.p=0.4: an exponent from 0 to 2"),
        (MoEConfig, {"experts": 4}, "model.moe.top_k=6: must not exceed model.moe.experts=4"),
        (MoEConfig, {"experts": 513}, "model.moe.experts=513: must not exceed 512"),
        (MoEConfig, {"backend": "zzz"}, "model.moe.backend='zzz': must be one of grouped_mm"),
        (LoomConfig, {"decay": 1.0}, "model.loom.decay=1.0: must be at least 0 and less than 1"),
        (TrainConfig, {"lr": -1.0}, "train.lr=-1.0: must be greater than 0"),
        (TrainConfig, {"seed": 2**63}, "train.seed=9223372036854775808: must be an integer up to"),
        (TrainConfig, {"micro_batch": 17}, "train.micro_batch=17: must not exceed train.batch_siz"),
        (TrainConfig, {"warmup": 0.95}, "train.warmup=0.95 and train.decay=0.1: must not add up"),
        (DataConfig, {"path": 5}, "data.path=5: must be str"),
        (Config, {"model": None}, "model=None: must be a group of fields, ModelConfig"),
        (Config, {"preset": 1}, "preset=1: must be str"),
    ],
)  # fmt: skip
def test_a_section_made_alone_refuses_as_the_command_line_does(section, values, sentence):
    for make in (section, functools.partial(dataclasses.replace, section())):
        with pytest.raises(InputError) as refused:
            make(**values)
        assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)


def test_what_fields_allow_together():
    with pytest.raises(InputError, match=r"model\.moe\.top_k=6: must not exceed .*experts=4"):
        Config().replace("model.moe", experts=4)
    with pytest.raises(
        InputError, match=r"train\.backprop_loops=5: must not exceed model\.loops=4"
    ):
        Config(train=TrainConfig(backprop="last", backprop_loops=5))
    assert Config(train=TrainConfig(backprop="segments", backprop_loops=5))


def test_a_configuration_from_before_a_field_takes_its_default():
    raw = json.loads(Config().to_json())
    del raw["model"]["moe"], raw["train"]["backprop"], raw["model"]["loom"]["decay"]
    assert Config.from_json(json.dumps(raw)) == Config()
