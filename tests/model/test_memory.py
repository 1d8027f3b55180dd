"""Bounds of memory: below what a step takes, near enough to refuse what cannot fit."""

import pytest
import torch

import deeploop
from deeploop.analyze.diagnose.diagnose import diagnose, peak_bytes
from deeploop.analyze.plan.hardware import DEVICES
from deeploop.analyze.plan.planner import Target, count, count_parameters
from deeploop.analyze.plan.roofline import MEASURED
from deeploop.analyze.profile.profile import Steps, open_profile
from deeploop.config import ModelConfig
from deeploop.config.presets import preset
from deeploop.model import memory
from deeploop.model.looplm import LoopLM
from deeploop.model.memory import check_diagnosis, least_training_bytes, parameters
from deeploop.train.setup import open_run
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import InputError
from deeploop.utils.memory import FreeMemory

CPU = torch.device("cpu")
SMALL = {"d_model": 64, "n_heads": 2, "seq_len": 128, "vocab_size": 256, "n_layers": 1}
RUNS = {
    "full": ("deeploop-tiny", {"loops": 5}, {}),
    "one step": ("deeploop-tiny", {"loops": 1}, {"steps": 1}),
    "loops recomputed": ("deeploop-tiny", {"loops": 3, "coda": 1}, {"recompute": "loop"}),
    "last": ("gpt2-small-r1-baseline", {"loops": 5}, {"backprop": "last", "precision": "bf16"}),
    "accumulated": ("deeploop-tiny", {"loops": 2, "n_layers": 2}, {"micro_batch": 2}),
    "adapters": ("gpt2-small-r1-baseline", {"loops": 3, "lora_rank": 16}, {}),
    "loom, segments": ("loom-tiny", {"loops": 3, "prelude": 1}, {"backprop": "segments"}),
    "loops of some": ("mor-tiny", {"loops": 5, "n_layers": 2}, {}),
    "of some, recomputed": ("mor-tiny", {"loops": 3}, {"recompute": "loop"}),
    "masked": ("mor-tiny", {"loops": 3, "depth": "token_choice"}, {"recompute": "visit"}),
}


def shrunk(run):
    name, model, train = RUNS[run]
    config = preset(name).replace("model", **SMALL | model)
    if config.model.moe.experts:
        config = config.replace("model.moe", experts=8, top_k=2, d_expert=32, shared=1)
    base = {"batch_size": 6, "precision": "fp32", "micro_batch": 0, "backprop": "full"}
    return config.replace("train", **base | {"backprop_loops": 2} | train)


def test_the_first_loops_keys_are_bounded_below_too():
    config = shrunk("loops of some").replace("model.mor", kv="first")
    real = count(config, Target(DEVICES["h200"], MEASURED, "cpu"), timed=False)
    bound = sum(least_training_bytes(config, CPU, config.train.batch_size))
    assert real.memory(config.train.batch_size).peak / 3 < bound
    assert bound < real.memory(config.train.batch_size).peak


@pytest.mark.parametrize("run", RUNS)
def test_a_step_takes_more_than_the_bound_and_less_than_three_times_it(run):
    config = shrunk(run)
    sequences = config.train.batch_size
    real = count(config, Target(DEVICES["h200"], MEASURED, "cpu"), timed=False)
    counted = real.memory(config.train.micro_batch or sequences)
    bound = sum(least_training_bytes(config, CPU, sequences))
    if config.train.steps == 1:  # its moments come after its activations
        assert counted.weights < bound < counted.peak - counted.moments
    else:
        assert counted.peak / 3 < bound < counted.peak
    assert parameters(config.model) == pytest.approx(count_parameters(config.model), rel=0.01)
    assert parameters(config.model) <= count_parameters(config.model)


@pytest.mark.parametrize(
    "fields",
    [
        {"inject": "adapter"}, {"inject": "contractive", "readout_map": True},
        {"inject": "add", "loop_signal": "add"}, {"loop_signal": "modulate", "n_layers": 2},
    ],
)  # fmt: skip
def test_the_matrices_between_the_loops_are_counted(fields):
    model = ModelConfig(**SMALL | {"residual": "pre_norm", "loops": 2} | fields)
    vectors = sum(p.numel() for p in LoopLM(model).parameters() if p.dim() == 1)
    assert parameters(model) == count_parameters(model) - vectors


@pytest.mark.parametrize("run", ["one step", "loom, segments"])
def test_a_diagnosis_takes_more_than_the_bound(run, monkeypatch):
    needed = []
    monkeypatch.setattr(memory, "check_fits", lambda n, *rest: needed.append(n))
    config = shrunk(run)
    check_diagnosis(config, CPU, 4)
    counted = peak_bytes(config.replace("train", recompute="none"), 4)
    assert counted / 3 < needed[0] < counted


@pytest.fixture
def little_memory(monkeypatch):
    """Let a process take a number of bytes."""

    def leave(free):
        monkeypatch.setattr("deeploop.utils.memory.free_memory", lambda _: FreeMemory(free, "test"))

    return leave


def test_what_cannot_fit_is_refused_from_python_and_nothing_is_written(
    config, quiet, tmp_path, little_memory
):
    deeploop.Trainer.open(config.replace("train", steps=1)).fit()
    run, before = str(tmp_path / "run"), sorted(tmp_path.rglob("*"))
    text = {"tokens": 4, "device": "cpu"}
    little_memory(2**20)  # the smallest of these runs takes less
    for call in (
        lambda: deeploop.load(run),
        lambda: deeploop.generate(run, "line", **text),
    ):
        call()
    new = config.replace("train", batch_size=400, out=str(tmp_path / "new"))
    for refused, named in (
        (lambda: deeploop.Trainer.open(new), "train.batch_size=400"),
        (lambda: open_profile(new, Steps(1, 1, 1), quiet, Ranks()), "train.batch_size=400"),
        (lambda: diagnose(new, [], quiet, sequences=60), "60 sequences"),
        (lambda: deeploop.generate(run, "line", num_samples=4000, **text), "num_samples=4000"),
        (lambda: deeploop.generate(run, "line", loops=10000, **text), "loops=10000"),
    ):
        with pytest.raises(InputError, match=f"{named}.* needs at least .* may take .*; "):
            refused()
    little_memory(2**10)
    for refused in (
        lambda: deeploop.load(run),
        lambda: deeploop.Trainer.open(config, resume=run),
    ):
        with pytest.raises(InputError, match=r"model\.n_layers=1.* needs at least"):
            refused()
    assert sorted(tmp_path.rglob("*")) == before


def test_memory_is_judged_before_the_corpus_is_read(config, quiet, little_memory):
    little_memory(2**20)
    absent = config.replace("data", path="nowhere.txt")
    with pytest.raises(InputError, match=r"model\.loops=100000"):
        open_run(absent.replace("model", loops=100000), quiet)
    with pytest.raises(InputError, match="nowhere"):
        open_run(absent, quiet)


def test_ranks_need_the_memory_of_their_own_sequences(config, little_memory):
    from deeploop.train.setup import check_memory

    little_memory(2**21)
    config = config.replace("train", batch_size=128)
    with pytest.raises(InputError, match=r"train\.batch_size=128"):
        check_memory(config, Ranks(0, 1))
    check_memory(config, Ranks(0, 8))
