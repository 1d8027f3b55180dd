"""Fields that are set but that another field leaves without effect are named."""

import pytest

from deeploop.config import Config, DataConfig, ModelConfig, ReasonerConfig, TrainConfig
from deeploop.train.describe import without_effect

TWO = {"cycles_high": 2}


@pytest.mark.parametrize(("reasoner", "others", "wanted"), [
    ({"segments": 8}, {},
     ["model.reasoner.segments=8: no effect with model.reasoner.cycles_high=0"]),
    (TWO | {"segments": 8, "layers_high": 3}, {}, []),
    (TWO, {"loops": 6, "n_layers": 3, "embed_std": 1.0}, [
        "model.n_layers=3: no effect without model.reasoner.cycles_high=0",
        "model.loops=6: no effect without model.reasoner.cycles_high=0",
        "model.embed_std=1.0: no effect without model.reasoner.cycles_high=0",
    ]),
    (TWO | {"shared": True, "layers_high": 3}, {},
     ["model.reasoner.layers_high=3: no effect without model.reasoner.shared=False"]),
    (TWO | {"mixer_width": 9, "scale_per": "module"}, {}, [
        "model.reasoner.mixer_width=9: no effect without model.reasoner.mixer=mlp",
        "model.reasoner.scale_per=module: no effect without model.reasoner.visits=paper|counted",
    ]),
    (TWO | {"mixer": "mlp", "mixer_width": 9, "visits": "paper", "scale_per": "module"}, {}, []),
])  # fmt: skip
def test_fields_of_and_beside_a_reasoner(reasoner, others, wanted):
    model = ModelConfig(residual="plain_post_norm", reasoner=ReasonerConfig(**reasoner), **others)
    data = DataConfig(puzzles="boards" if model.reasoner.cycles_high else "")
    assert without_effect(Config(model=model, data=data)) == wanted


def test_a_constant_rate_has_no_floor():
    train = TrainConfig(schedule="constant", min_lr=0.1)
    assert without_effect(Config(train=train)) == [
        "train.min_lr=0.1: no effect without train.schedule=wsd|cosine"
    ]
