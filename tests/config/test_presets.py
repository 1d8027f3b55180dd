"""Presets: the papers' models, and that an arm differs from its base in what it says."""

import dataclasses

import pytest
import torch

from deeploop.config.presets import LOOM_ABLATIONS, SUMMARY, preset, presets
from deeploop.config.presets.loom import isoflop_cost, isoflop_top_k
from deeploop.model.looplm import LoopLM
from deeploop.utils.errors import InputError


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
    assert dataclasses.replace(ours.model, residual="pre_norm") == base.model
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


def test_parcae_trains_as_released():
    model, train = preset("parcae-140m").model, preset("parcae-140m").train
    assert (model.prelude, model.n_layers, model.coda, model.d_model) == (2, 2, 2, 768)
    assert model.inject == "contractive" and model.input_norm and model.readout_map
    assert (model.loops, train.backprop, train.backprop_loops) == (8, "last", 4)
    assert train.loop_count_per == "sequence" and train.batch_size * model.seq_len == 2**19


def test_a_deep_equilibrium_model_starts_at_zero_and_solves():
    model, train = preset("deq-tiny").model, preset("deq-tiny").train
    assert (model.depth, model.start_std, model.solver.method) == ("fixed_point", 0, "anderson")
    assert train.backprop == "last" and train.backprop_loops < model.loops


def test_unknown_preset_names_the_nearest():
    with pytest.raises(InputError, match=r"'deeploop-tinny'.*deeploop-tiny"):
        preset("deeploop-tinny")


LOOM_SIZES = ["loom-tiny", "loom-100m", "loom-329m", "loom-1.7b"] + [
    f"loom-700m-isoflop-h{h}" for h in range(1, 7)
]


@pytest.mark.parametrize("size", LOOM_SIZES)
def test_every_loom_has_both_readings_and_every_arm(size):
    base = preset(size)
    assert base.model.residual == "loom" and base.train.backprop == "segments"
    assert base.train.backprop_loops == 3 and base.train.step_per == "segment"
    assert base.model.moe.z_loss == 1e-3 and base.model.moe.capacity_factor == 1.5
    assert (base.model.loom.strength, base.model.loom.decay) == (0.5, 0.5)
    released = preset(f"{size}-released").model
    assert released.loom.global_source == "readout" and released.loom.carry == "normalised"
    assert released.moe.z_loss == 0
    for arm in LOOM_ABLATIONS:
        other = preset(f"{size}-{arm}")
        assert other.train == base.train and arm in SUMMARY


def switched_off(name):
    """Which of LOOM's five parts an arm lacks."""
    model = preset(name).model
    parts = dataclasses.asdict(model.loom) | {"router_per_loop": model.moe.router_per_loop}
    return {part for part, on in parts.items() if on is False}


def test_arms_of_the_ablation_lack_what_they_say():
    parts = {"scaling", "injection", "branch_norm", "looping_residual", "router_per_loop"}
    assert switched_off("loom-tiny") == set()
    assert switched_off("loom-tiny-native") == parts
    assert switched_off("loom-tiny-scaling-only") == parts - {"scaling"}
    assert switched_off("loom-tiny-injection-only") == parts - {"injection"}
    for arm, part in [
        ("no-scaling", "scaling"), ("no-injection", "injection"),
        ("no-branch-norm", "branch_norm"), ("no-looping-residual", "looping_residual"),
        ("shared-router", "router_per_loop"),
    ]:  # fmt: skip
        assert switched_off(f"loom-tiny-{arm}") == {part}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("loom-100m", 100e6), ("loom-329m", 329e6), ("loom-1.7b", 1.7e9),
     ("loom-700m-isoflop-h1", 700e6)],
)  # fmt: skip
def test_loom_sizes_are_the_papers(name, parameters):
    with torch.device("meta"):
        model = LoopLM(preset(name).model)
    size = sum(p.numel() for p in model.parameters())
    assert size == pytest.approx(parameters, rel=0.015)


@pytest.mark.parametrize(
    ("name", "d_model", "n_layers", "lr", "steps", "micro"),
    [("loom-329m", 512, 10, 2e-4, 10_000, 16), ("loom-1.7b", 1280, 15, 6e-5, 57_000, 8)],
)
def test_loom_trains_as_released(name, d_model, n_layers, lr, steps, micro):
    model, train = preset(name).model, preset(name).train
    assert (model.d_model, model.n_layers, model.vocab_size) == (d_model, n_layers, 49152)
    assert (model.moe.experts, model.moe.top_k, model.moe.shared) == (30, 6, 2)
    assert (train.lr, train.steps, train.micro_batch) == (lr, steps, micro)
    assert train.batch_size * model.seq_len == 2**20
    assert (train.schedule, train.warmup, train.decay, train.min_lr) == ("wsd", 0.1, 0.1, 0.1)
    assert preset("loom-1.7b-released").train.warmup == 0.01


def test_isoflop_models_cost_the_same():
    """f(H, k) = H (6 + 3k), about 84; the paper's k for H = 1 to 6."""
    assert [isoflop_top_k(h) for h in range(1, 7)] == [26, 12, 7, 5, 4, 3]
    for h in range(1, 7):
        assert isoflop_cost(h, isoflop_top_k(h)) == pytest.approx(84, abs=6)
        moe = preset(f"loom-700m-isoflop-h{h}").model.moe
        assert moe.top_k + moe.shared == isoflop_top_k(h)


def test_a_name_far_from_all_shows_the_families():
    with pytest.raises(InputError, match=r"'zzz': unknown; there are deeploop-tiny, gpt2-.*loom-"):
        preset("zzz")
