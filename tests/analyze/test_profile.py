"""Profiles of real steps: each product has its component, times add up, the files are written."""

import gzip
import json
from collections import Counter

import numpy as np
import pytest
import torch

from deeploop.analyze import plots
from deeploop.analyze.plan.memory import step_memory
from deeploop.analyze.profile import profile, trace
from deeploop.cli import main
from deeploop.config import MoEConfig
from deeploop.train.setup import open_run
from deeploop.utils.distributed import Ranks
from tests.helpers.ranks import finish, start_ranks

STEPS = profile.Steps(warmup=1, timed=2, traced=1)
SMALL = [
    "--model.d-model", "16", "--model.n-heads", "2", "--model.loops", "2", "--model.seq-len", "16",
    "--train.batch-size", "4", "--steps", "2", "--warmup", "1", "--train.precision", "fp32",
]  # fmt: skip


def opened(config, quiet, model=None, **train):
    """A trainer to profile, on random tokens."""
    config = config.replace("data", path="").replace("train", steps=2, **train)
    config = config.replace("model", **model or {})
    return profile.open_profile(config, STEPS, quiet, Ranks())


def events_of(trainer, path):
    profile.take_steps(trainer)
    profile.trace_steps(trainer, 1).export_chrome_trace(str(path))
    events = trace.read(path)
    (step,) = trace.steps(events)
    return trace.events_of(events, step), step


BACKPROP = {
    "full": ({}, 3, 3),
    "segments": ({"backprop": "segments", "backprop_loops": 2}, 3, 3),
    "last": ({"backprop": "last", "backprop_loops": 1}, 3, 1),
    "accumulated": ({"micro_batch": 2}, 6, 6),
}


@pytest.mark.parametrize(
    ("backprop", "recompute"),
    [
        ("full", "none"),
        ("full", "loop"),
        ("segments", "visit"),
        ("last", "visit"),
        ("accumulated", "none"),
        ("accumulated", "visit"),
    ],
)
def test_every_product_has_its_component_and_phase(backprop, recompute, config, quiet, tmp_path):
    """Two products a branch forward, four backward, two where it is recomputed."""
    train, loops, with_gradient = BACKPROP[backprop]
    sizes = {"loops": 3, "n_layers": 2}
    trainer = opened(config, quiet, sizes, recompute=recompute, **train)
    with trainer.lock:
        inside, step = events_of(trainer, tmp_path / "t.json.gz")
    host = [e for e in inside if e.get("cat") in trace.ON_HOST]
    counts, end = Counter(), 0.0
    for e, label in trace.labels(host, step):
        # Checkpointing sends each op through its dispatch mode, where it shows once more.
        if e["name"] == "aten::mm" and e["ts"] >= end:
            counts[label] += 1
            end = e["ts"] + e["dur"]
    expected = Counter()
    for component in ("attention", "mlp"):
        expected[component, "forward"] = 2 * 2 * loops
        expected[component, "backward"] = 4 * 2 * with_gradient
        expected[component, "recompute"] = 0 if recompute == "none" else 2 * 2 * with_gradient
    products = {
        k: n for k, n in counts.items() if k[0] != "loss"
    }  # of the loss: as many as its chunks
    assert products == +expected


def test_experts_router_and_updates_are_told_apart(config, quiet, tmp_path):
    moe = MoEConfig(experts=4, top_k=2, d_expert=8, shared=1)
    trainer = opened(
        config, quiet, {"residual": "loom", "moe": moe}, backprop="segments", backprop_loops=1
    )
    with trainer.lock:
        inside, step = events_of(trainer, tmp_path / "t.json.gz")
    host = [e for e in inside if e.get("cat") in trace.ON_HOST]
    by_op = {(e["name"], *label) for e, label in trace.labels(host, step)}
    for op, component in (
        ("sigmoid_router", "router"), ("experts", "experts"), ("expert_combine", "updates"),
        ("linear_update", "updates"),
    ):  # fmt: skip
        for name, phase in (
            (f"deeploop::{op}", "forward"),
            (f"deeploop::{op}_backward", "backward"),
        ):
            assert {x for x in by_op if x[0] == name} == {(name, component, phase)}
    times = trace.time_by_label(inside, step)
    assert sum(times.values()) == pytest.approx(step["dur"] / 1e3, rel=1e-9)
    assert trace.IDLE not in times
    names = [s.name for s in trace.sections(inside, step, [(0.0, 0)])]
    assert names == [
        f"loops {i}-{i} {p}" if p != "optimizer" else p
        for i in (1, 2) for p in ("forward", "backward", "optimizer")
    ]  # fmt: skip


def test_traced_memory_is_the_counted_memory(config, quiet, tmp_path):
    trainer = opened(config, quiet, {"loops": 4, "d_model": 64, "vocab_size": 64}, micro_batch=4)
    with trainer.lock:
        inside, step = events_of(trainer, tmp_path / "t.json.gz")
    base = profile.state_bytes(trainer)
    curve = trace.memory(inside, step, False, base)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    buffers = sum(b.nbytes for b in trainer.model.buffers())
    steps = 4 * len(list(trainer.model.parameters()))  # AdamW counts them, one by weight
    assert base == 3 * weights + buffers + steps
    counted = step_memory(trainer.config, "cpu", exact=True).at(4).peak
    assert max(size for _, size in curve) == pytest.approx(counted, rel=0.1)
    assert curve[-1][1] == pytest.approx(base, rel=0.05)  # gradients and activations are gone


def test_the_command_writes_a_profile_and_no_run(capsys, tmp_path, monkeypatch, pictures):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *SMALL]) == 0
    said = capsys.readouterr().out
    for word in ("random tokens", "tokens/s", "by the profiler", "attention", "backward", "peak"):
        assert word in said
    (folder,) = (tmp_path / "profiles").iterdir()
    assert {p.name for p in folder.iterdir()} == {"profile.json", "profile.png", "trace.json.gz"}
    figures = json.loads((folder / "profile.json").read_text())
    spent = sum(ms for by in figures["parts_ms"].values() for ms in by.values())
    assert spent == pytest.approx(figures["traced_step_ms"], rel=1e-6)
    assert len(figures["step_ms_each"]) == 2 and min(figures["step_ms_each"]) > 0
    assert figures["tokens_per_second"] == pytest.approx(4 * 16e3 / figures["step_ms"])
    assert figures["memory_gib"]["peak"] >= figures["memory_gib"]["loops 1-2 backward"] > 0
    assert figures["versions"]["torch"] == torch.__version__
    with gzip.open(folder / "trace.json.gz") as file:
        assert json.load(file)["traceEvents"]
    assert main(["train", "--resume", str(folder)]) == 2


def test_a_corpus_is_read_where_one_is_named(capsys, tmp_path, corpus_file):
    out = str(tmp_path / "out")
    assert main(["profile", *SMALL, "--data", str(corpus_file), "--out", out]) == 0
    assert "random" not in capsys.readouterr().out
    assert main(["profile", *SMALL, "--out", out]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--warmup", "0"], "warmup=0"),
        (["--traced", "-1"], "traced=-1"),
        (["--steps", "0"], "train.steps=0"),
        (["--loops", "0"], "model.loops=0"),
        (["nothing-like-it"], "nothing-like-it"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--resume", "x"], "--resume"),
        (["--train.device", "tpu"], "tpu"),
    ],
)
def test_bad_input_ends_in_one_sentence(flags, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *flags]) == 2
    said = capsys.readouterr().err
    assert named in said and said.count("\n") == 1 and not list(tmp_path.iterdir())


def test_steps_that_fail_leave_no_folder(config, quiet):
    trainer = opened(config, quiet)
    assert trainer.folder.exists()
    trainer.optimizer = None
    with pytest.raises(AttributeError):
        profile.profile(trainer, STEPS)
    assert not trainer.folder.exists()


def test_random_tokens_are_of_the_whole_vocabulary_and_the_seed(config):
    config = config.replace("model", vocab_size=11, seq_len=64)
    first = profile.random_corpus(config).train.read(0, 4000)
    assert set(np.unique(first)) == set(range(11))
    assert np.array_equal(first, profile.random_corpus(config).train.read(0, 4000))
    other = profile.random_corpus(config.replace("train", seed=1)).train.read(0, 4000)
    assert not np.array_equal(first, other)
    assert profile.random_corpus(config.replace("model", vocab_size=0)).vocab_size >= 256


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_kernels_are_split_and_the_allocator_is_read(config, quiet):
    trainer = opened(config, quiet, {"d_model": 64}, device="cuda", recompute="visit")
    figures = profile.profile(trainer, STEPS)
    parts = figures["parts_ms"]
    assert figures["clock"] == "GPU kernels"
    spent = sum(ms for by in parts.values() for ms in by.values())
    assert spent == pytest.approx(figures["traced_step_ms"], rel=1e-6)
    for part in ("attention", "mlp", "updates"):
        assert all(parts[part][p] > 0 for p in ("forward", "recompute", "backward"))
    assert parts["loss"]["forward"] > 0 and parts["optimizer"]["outside"] > 0
    named = sum(ms for p, by in parts.items() if p not in ("other", "idle") for ms in by.values())
    assert parts["other"].get("backward", 0) + parts["other"].get("forward", 0) < 0.2 * named
    assert figures["memory_gib"]["peak"] == pytest.approx(figures["peak_memory_gib"], rel=0.1)
    assert (trainer.folder / "memory.pickle").stat().st_size > 0


def test_two_ranks_profile_together_and_the_first_reports(tmp_path):
    out = tmp_path / "out"
    first, second = finish(
        start_ranks(["-m", "deeploop.cli", "profile", *SMALL, "--out", str(out)])
    )
    assert "communication" in first and "communication" not in second
    figures = json.loads((out / "profile.json").read_text())
    assert figures["ranks"] == 2 and figures["parts_ms"]["communication"]["outside"] > 0
    assert figures["tokens_per_second"] == pytest.approx(4 * 16e3 / figures["step_ms"])


def test_a_gpus_readings_and_mfu_are_shown(config, quiet, tmp_path, pictures):
    """A CPU has neither: these are figures as a GPU's profile would have them."""
    trainer = opened(config, quiet)
    with trainer.lock:
        inside, step = events_of(trainer, tmp_path / "t.json.gz")
        summary = profile.summarise([step, *inside], trainer)
    readings = {"seconds": [0.0, 0.1], "used_gib": [1.0, 2.0], "power_w": [300.0, 650.5]}
    readings |= {"sm_mhz": [1980, 1980], "memory_mhz": [3201, 3201]}
    figures = {
        **profile.setup_figures(trainer),
        **profile.speed_figures(trainer, [0.3, 0.1, 0.2]),
        **summary.figures,
        "mfu": 0.421,
        "telemetry": readings,
    }
    assert figures["step_ms"] == pytest.approx(200)
    profile.report(figures, tmp_path, quiet)
    said = quiet.file.getvalue()
    assert "MFU 42.1%" in said and "power_w up to 650.5" in said
    plots.profile(figures, summary.curve, summary.sections, tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_a_profiled_step_has_the_runs_teacher(config, quiet, tmp_path):
    parent = str(tmp_path / "parent")
    open_run(config.replace("train", out=parent, steps=1), quiet).fit()
    trainer = opened(config, quiet, teacher=parent)
    trainer.step()
    assert trainer.teacher is not None
