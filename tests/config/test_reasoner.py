"""A reasoner's fields: its scales from its visits, what it refuses, and that others stay."""

import json

import pytest

from deeploop.config import Config, ModelConfig, MoEConfig, ReasonerConfig
from deeploop.config.presets.reasoner import reasoner_presets
from deeploop.config.reasoner import Scales, module_scales
from deeploop.utils.errors import InputError


def model(p=None, **fields) -> ModelConfig:
    reasoner = ReasonerConfig(**{"cycles_high": 2, "layers_high": 4, "layers_low": 4} | fields)
    return ModelConfig(residual="plain_post_norm", p=p, reasoner=reasoner)


TRM = {"shared": True, "gradient": "last_cycle", "layers_low": 2}


@pytest.mark.parametrize(("fields", "visits"), [
    ({"visits": "paper"}, 24),
    ({"visits": "counted"}, 16),
    ({"visits": "counted", "gradient": "last_cycle"}, 24),
    (TRM | {"visits": "counted", "cycles_low": 6}, 28),
    (TRM | {"visits": "counted", "cycles_low": 4}, 20),
    (TRM | {"visits": "paper", "cycles_low": 6}, 28),
])  # fmt: skip
def test_visits_that_the_scales_count(fields, visits):
    """24 of the paper's HRM, 16 of its released code; 28 and 20 of TRM."""
    high, low = module_scales(model(**fields))
    assert model(**fields).reasoner.scaled_visits == visits
    assert high == low == pytest.approx((visits**0.5, (4 * visits) ** -0.5))


def test_scales_of_the_papers_hrm():
    """alpha 4.899 and beta .10206 of 24 visits, 4 and .125 of 16."""
    assert module_scales(model(visits="paper"))[0] == pytest.approx((4.899, 0.10206), abs=5e-4)
    assert module_scales(model(visits="counted"))[1] == (4.0, 0.125)


def test_scales_by_module_are_those_of_its_own_visits():
    """R_g(H) = 1 and R_g(L) = C_L of the paper; one call of L has a gradient in HRM's code."""
    high, low = module_scales(model(visits="paper", scale_per="module", layers_high=3))
    assert high == pytest.approx((6**0.5, 24**-0.5)) and low == pytest.approx((4, 1 / 8))
    high, low = module_scales(model(visits="counted", scale_per="module"))
    assert high == low == pytest.approx((8**0.5, 32**-0.5))
    shared = module_scales(model(**TRM, visits="counted", scale_per="module"))
    assert shared == module_scales(model(**TRM, visits="counted"))


def test_the_exponent_is_a_field():
    high, low = module_scales(model(p=0.25, visits="paper"))
    assert high == low == pytest.approx((24**0.25, 96**-0.25))
    with pytest.raises(InputError, match=r"model\.p=0\.25.*model\.reasoner\.visits"):
        model(p=0.25)
    assert module_scales(model()) == (Scales(1, 1), Scales(1, 1))


@pytest.mark.parametrize(("name", "value"), [
    ("prelude", 1), ("coda", 2), ("start", "noise"), ("inject", "add"), ("loop_norm", "each"),
    ("input_norm", True), ("readout_map", True), ("loop_signal", "add"), ("depth", "act"),
    ("lora_rank", 4),
])  # fmt: skip
def test_what_a_reasoner_has_not_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=rf"^model\.{name}={value}: a reasoner .*leave") as refused:
        ModelConfig(
            residual="plain_post_norm", reasoner=ReasonerConfig(cycles_high=1), **{name: value}
        )
    assert "\n" not in str(refused.value)
    ModelConfig(residual="plain_post_norm", **{name: value})  # without cycles all is as before


def test_a_reasoner_refuses_experts_and_other_rules():
    one = ReasonerConfig(cycles_high=1)
    with pytest.raises(InputError, match=r"model\.moe\.experts=4: a reasoner"):
        ModelConfig(residual="plain_post_norm", reasoner=one, moe=MoEConfig(experts=4, top_k=2))
    with pytest.raises(InputError, match=r"model\.residual=deeploop: .*needs plain_post_norm$"):
        ModelConfig(residual="deeploop", reasoner=one)


@pytest.mark.parametrize(("name", "value"), [
    ("cycles_high", -1), ("cycles_low", 0), ("segments", 0), ("exploration", 1.5),
    ("gradient", "all"), ("halting", "never"), ("puzzle_tokens", -1), ("shared", 1),
])  # fmt: skip
def test_impossible_values_are_refused(name, value):
    with pytest.raises(InputError, match=rf"model\.reasoner\.{name}="):
        ReasonerConfig(**{name: value})


def test_a_file_without_the_section_is_a_loop():
    raw = json.loads(Config().to_json())
    del raw["model"]["reasoner"]
    for name in ("optimizer", "ema", "puzzle_lr", "puzzle_decay"):
        del raw["train"][name]
    assert Config.from_json(json.dumps(raw)) == Config()
    assert Config().model.reasoner.cycles_high == 0


def test_presets_have_the_papers_values():
    named = {config.preset: config for config in reasoner_presets()}
    assert len(named) == 11
    for config in named.values():
        assert Config.from_json(config.to_json()) == config
    hrm, trm = named["hrm-sudoku"], named["trm-sudoku"]
    assert (hrm.model.d_model, hrm.model.n_heads, hrm.model.ff_width) == (512, 8, 1536)
    assert (hrm.train.optimizer, hrm.train.lr, hrm.train.batch_size) == ("adam_atan2", 1e-4, 768)
    assert (hrm.train.beta1, hrm.train.beta2, hrm.train.weight_decay) == (0.9, 0.95, 1.0)
    assert hrm.train.warmup * hrm.train.steps == pytest.approx(2000)
    assert hrm.model.reasoner == ReasonerConfig(2, 2, 4, 4, puzzle_tokens=1)
    assert trm.model.reasoner == ReasonerConfig(
        3, 6, layers_low=2, shared=True, gradient="last_cycle", mixer="mlp", mixer_width=512,
        positions=False, puzzle_tokens=16, halting="halt",
    )  # fmt: skip
    assert (trm.train.ema, trm.train.puzzle_lr) == (0.999, 1e-4)
    assert (named["hrm-arc"].train.ema, named["hrm-arc"].train.puzzle_lr) == (0, 1e-2)
    assert named["trm-arc"].model.reasoner.cycles_low == 4
    for name, visits in (("hrm-arc-deeploop", 24), ("hrm-arc-deeploop-counted", 16)):
        config = named[name]
        assert config.model.reasoner.scaled_visits == visits
        plain = config.replace("model.reasoner", visits="plain").model
        assert (plain, config.train) == (named["hrm-arc"].model, named["hrm-arc"].train)
