import dataclasses
import json

import pytest

from deeploop.config import Config, ModelConfig, TrainConfig, preset, presets
from deeploop.errors import InputError


def test_presets_cover_the_papers_grid():
    names = set(presets())
    for size in ("small", "medium"):
        for loops in (1, 3, 5, 7):
            for arm in ("baseline", "deeploop"):
                assert f"gpt2-{size}-r{loops}-{arm}" in names
    assert "deeploop-tiny" in names
    assert all(name == config.preset for name, config in presets().items())


def test_arms_of_a_preset_differ_in_the_arm_alone():
    ours, base = (preset(f"gpt2-medium-r5-{arm}") for arm in ("deeploop", "baseline"))
    assert dataclasses.replace(ours.model, arm="baseline") == base.model
    assert ours.train == base.train and ours.data == base.data


@pytest.mark.parametrize("name", [n for n in presets() if n.startswith("gpt2")])
def test_presets_train_as_the_papers_do(name):
    model, data, train = preset(name).model, preset(name).data, preset(name).train
    assert (model.d_model, model.n_layers) == ((768, 12) if "small" in name else (1024, 24))
    assert model.d_model // model.n_heads == 128 and model.qk_norm
    assert data.tokenizer == "gpt2" and model.vocab_size == 50304
    assert (train.steps, train.batch_size, model.seq_len) == (100_000, 480, 1024)
    assert (train.lr, train.schedule, train.warmup * train.steps) == (1e-3, "cosine", 2000)
    assert (train.beta1, train.beta2, train.weight_decay, train.clip) == (0.9, 0.95, 0.1, 1.0)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(InputError, match=r"'deeploop-tinny'.*deeploop-tiny"):
        preset("deeploop-tinny")


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
        ("data", "val_fraction", 1.0),
    ],
)
def test_impossible_values_are_refused_by_name_and_value(part, name, value):
    config = Config()
    with pytest.raises(InputError) as refused:
        config.replace(part, **{name: value})
    assert f"{part}.{name}={value}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_exponent_needs_an_arm_that_has_one():
    with pytest.raises(InputError, match=r"model\.p=0\.4.*model\.arm=baseline"):
        Config(model=ModelConfig(arm="baseline", p=0.4))


def test_ff_width_is_eight_thirds_in_multiples_of_64():
    assert ModelConfig(d_model=768).ff_width == 2048
    assert ModelConfig(d_model=1024).ff_width == 2752
    assert ModelConfig(d_model=64).ff_width == 192
    assert ModelConfig(d_model=64, d_ff=100).ff_width == 100


def test_micro_batches_default_to_the_batch():
    assert TrainConfig().micro_batch == 0


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "loops", "4"), ("model", "loops", 2.0), ("model", "loops", True),
        ("model", "loops", 2**31), ("model", "arm", "zzz"), ("model", "p", "x"),
        ("model", "qk_norm", 1), ("data", "path", 5), ("train", "lr", None),
        ("train", "seed", 2**63),
    ],
)  # fmt: skip
def test_values_of_another_type_are_refused(part, name, value):
    raw = json.loads(Config().to_json())
    raw[part][name] = value
    with pytest.raises(InputError, match=rf"{part}\.{name}={value!r}: must be"):
        Config.from_json(json.dumps(raw))
