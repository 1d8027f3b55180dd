"""Predictions: exact where they claim to be, near the papers' and the measured figures."""

import json
import re

import pytest
import torch

from deeploop.analyze.plan.hardware import DEVICES
from deeploop.analyze.plan.memory import PeakBytes
from deeploop.analyze.plan.planner import (
    Estimate,
    count,
    count_parameters,
    count_whole,
    estimate,
    largest,
    resolve,
    target_of,
)
from deeploop.analyze.plan.report import (
    GIB,
    PAPER_HOURS,
    PAPER_MFU,
    hours_at,
    matrix,
    matrix_sum,
)
from deeploop.cli import main
from deeploop.config.presets import preset
from deeploop.model.looplm import LoopLM
from deeploop.utils.errors import InputError

H200 = target_of("h200")
SMALL = {"d_model": 64, "n_heads": 2, "n_layers": 3, "seq_len": 288, "vocab_size": 2048}


def small(name, model=None, **train):
    """A preset shrunk to three narrow layers, in accumulated batches."""
    config = preset(name).replace("model", **SMALL | (model or {}))
    if config.model.moe.experts:
        config = config.replace("model.moe", d_expert=32)
    return resolve(config.replace("train", **{"batch_size": 24, "micro_batch": 4} | train), "cuda")


RUNS = {
    "deeploop": small("gpt2-small-r3-deeploop"),
    "pre_norm, visits recomputed": small("gpt2-small-r3-baseline", recompute="visit"),
    "loom": small("loom-tiny", {"loops": 3}, backprop_loops=2),
    "released loom, last loops": small(
        "loom-tiny-released", {"loops": 3}, backprop="last", backprop_loops=2
    ),
    "native loop": small("loom-tiny-native", {"loops": 2}, backprop="full"),
}


@pytest.mark.parametrize("run", RUNS)
def test_layers_beyond_two_add_what_the_second_adds(run):
    short, whole = count(RUNS[run], H200), count_whole(RUNS[run], H200)
    for rows in (2, 4, 12):
        assert short.memory(rows).peak == pytest.approx(whole.memory(rows).peak, rel=1e-9)
    assert short.by_component == pytest.approx(whole.by_component) and short.host == pytest.approx(
        whole.host
    )


@pytest.mark.parametrize("batch", [24, 5])
def test_the_largest_micro_batch_is_the_last_that_fits(batch):
    narrow = {"n_layers": 1, "loops": 2}
    config = small("gpt2-small-r1-deeploop", narrow, batch_size=batch, micro_batch=0)
    accumulated = count(config.replace("train", micro_batch=2), H200, timed=False)
    step = count(config, H200, timed=False)  # of any amount of memory
    for rows in (1, 3, 4):
        room = accumulated.memory(rows).peak + 1
        device = DEVICES["h200"]._replace(memory=room / 0.95)
        target = H200._replace(device=device)
        assert largest(config, target, step) == rows
    assert largest(config, H200, step) == batch
    nothing = H200._replace(device=DEVICES["h200"]._replace(memory=1.0))
    assert largest(config, nothing, step) == 0


# README: gpt2-small, 32 x 1024 tokens, one H200: loops, --train.compile, tokens/s, GiB.
MEASURED = [
    (1, True, 343_000, 14.1),
    (7, True, 84_600, 82.7),
    (1, False, 241_000, None),
    (7, False, 55_800, None),
]


@pytest.mark.parametrize(("loops", "compiled", "rate", "gib"), MEASURED)
def test_predictions_are_near_those_measured_on_an_h200(loops, compiled, rate, gib):
    """Memory within 5%. Speed is fitted to what six loops more take, not to the totals."""
    config = preset(f"gpt2-small-r{loops}-deeploop")
    config = config.replace("train", batch_size=32, micro_batch=32, compile=compiled)
    step = count(resolve(config, "cuda"), H200)
    predicted = 32 * 1024 / sum(step.by_component.values())
    assert rate < predicted < 1.18 * rate
    if gib is not None:
        assert step.memory(32).peak / GIB == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize("name", ["deeploop-tiny", "loom-tiny"])
def test_compiled_counts_stay_compiled(name):
    """torch.compile gives up after some recompilations of a function; a plan starts afresh."""
    model = {"n_layers": 1, "loops": 1, "seq_len": 288}
    config = small(name, model, compile=True, batch_size=4)
    with torch._dynamo.config.patch(recompile_limit=1):
        first, *others = (count(config, H200) for _ in range(3 if name == "deeploop-tiny" else 2))
    assert all(
        s.memory(4) == first.memory(4) and s.by_component == first.by_component for s in others
    )
    eager = count(config.replace("train", compile=False), H200)
    assert first.memory(4).peak < eager.memory(4).peak


def test_the_papers_matrix_takes_its_hours_at_its_mfu():
    """arXiv 2607.13491: 16 runs, 3,700 H200-hours; 29% of 6 FLOPs a token and weight."""
    device = DEVICES["h200"]
    assert len(matrix()) == 16
    assert sum(hours_at(c, device, PAPER_MFU) for c in matrix()) == pytest.approx(
        PAPER_HOURS, rel=0.15
    )
    saved = sum(hours_at(c, device, PAPER_MFU) - hours_at(c, device, 0.5) for c in matrix())
    assert saved == pytest.approx(PAPER_HOURS * (1 - 0.29 / 0.5), rel=0.15)


def test_slow_launches_set_the_step_time():
    e = estimate(preset("deeploop-tiny"), H200)
    assert e.seconds == e.host > sum(e.by_component.values())
    slow = e._replace(by_component={"GEMM": 2 * e.host})
    assert slow.seconds == 2 * e.host and slow.hours == 2 * e.hours


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("model.moe", {"backend": "reference"}, "model.moe.backend"),
        ("data", {"tokenizer": "mine/tokenizer.json"}, "model.vocab_size"),
    ],
)
def test_runs_that_cannot_be_planned_are_refused_by_name(section, values, named):
    with pytest.raises(InputError, match=named):
        resolve(preset("loom-tiny").replace(section, **values), "cuda")


def planned(capsys, *arguments):
    code = main(["plan", *arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_plan_says_memory_time_and_hours(capsys):
    overrides = ("--backprop", "segments", "--micro-batch", "8", "--model.n-layers", "1")
    code, said, _ = planned(capsys, "loom-329m", *overrides)
    assert code == 0
    for word in (
        "H200", "micro-batches of 8", "backprop segments, 3 loops", "GiB", "experts", "tokens/s",
        "MFU", "10.49 B tokens", "paper: 12.6 of 19.3 GiB, 0.65",
    ):  # fmt: skip
        assert word in said


def test_plan_as_json(capsys):
    code, said, _ = planned(capsys, "--device", "a100", "--json")
    e = json.loads(said)
    assert code == 0 and e["device"] == "A100 SXM 80 GB" and e["parameters"] == 935_808
    memory = e["memory"]
    assert memory["peak"] == pytest.approx(sum(memory[name] for name in PeakBytes._fields))


def test_plan_measures_this_cpu(capsys):
    code, said, _ = planned(capsys, "--device", "cpu", "--loops", "1")
    assert code == 0 and "this CPU" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--device", "tpu"], "device='tpu'"), (["loom-tiny", "--all"], "loom-tiny")],
)
def test_plan_refuses_by_name(capsys, arguments, named):
    code, _, said = planned(capsys, *arguments)
    assert code == 2 and named in said and said.count("\n") == 1


def test_options_need_only_fit_the_runs_that_are_planned(capsys):
    """The matrix's batches hold 32 sequences, the default preset's 16; what fits none is named."""
    code, _, said = planned(capsys, "--matrix", "--micro-batch", "32", "--device", "tpu")
    assert code == 2 and "device='tpu'" in said
    code, _, said = planned(capsys, "--all", "--micro-batch", "32")
    assert code == 2 and "deeploop-tiny: train.micro_batch=32" in said and said.count("\n") == 1


def test_units_follow_the_size(capsys):
    code, said, _ = planned(capsys, "--model.n-layers", "1", "--model.loops", "1")
    assert code == 0 and not re.search(r" 0\.0+ ", said)
    for word in ("MFLOP", "weights 1.9 MiB", "0.573 million tokens", "seconds on one device"):
        assert word in said


@pytest.mark.parametrize("device", ["h200", "b200"])
def test_the_papers_hours_are_printed_for_its_own_runs_alone(device):
    target = target_of(device)
    configs = [resolve(c, "cuda") for c in matrix()]
    estimates = [
        Estimate(c, target, 0, PeakBytes(0, 0, 0, 0), {"GEMM": 1.0}, 0.0, 1) for c in configs
    ]
    said = "\n".join(matrix_sum(estimates))
    assert "3,700  as the paper reports" in said and "the paper's hours are 34%" in said
    halved = [e._replace(config=e.config.replace("train", steps=100)) for e in estimates]
    assert len(matrix_sum(halved)) == 2


@pytest.mark.parametrize("name", ["gpt2-small-r3-deeploop", "loom-329m"])
def test_parameters_are_those_of_the_model(name):
    with torch.device("meta"):
        whole = sum(p.numel() for p in LoopLM(preset(name).model).parameters())
    assert count_parameters(preset(name).model) == whole
