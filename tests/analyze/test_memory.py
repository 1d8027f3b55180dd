"""Counted memory: storages, segments that do not grow with the loops, a real step's bytes."""

import pytest
import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from deeploop.analyze.plan.hardware import DEVICES
from deeploop.analyze.plan.memory import (
    LiveBytes,
    chunk_rows,
    distinct,
    recognisable_batch,
    step_memory,
)
from deeploop.analyze.plan.planner import Target, count
from deeploop.analyze.plan.roofline import MEASURED
from deeploop.config.backprop import segments
from deeploop.config.presets import preset, presets
from deeploop.model.looplm import LoopLM
from deeploop.train.backprop import MicroBatch, run_segment
from deeploop.train.setup import open_run


def test_storages_count_once_and_until_they_are_freed():
    with LiveBytes() as live:
        a = torch.zeros(1000)
        b = a.view(10, 100)[2:]
        assert live.now == live.peak == 4000
        c = b * 2
        assert live.now == 4000 + 3200
        del a
        assert live.now == 7200  # b is a view of it
        del b, c
        assert live.now == 0 and live.peak == 7200


def test_fake_tensors_count_as_real_ones():
    def run():
        x = torch.zeros(64, 32, requires_grad=True)
        w = torch.zeros(32, 128, requires_grad=True)
        (x @ w).relu().sum().backward()

    with LiveBytes() as real:
        run()
    with FakeTensorMode(), LiveBytes() as fake:
        run()
    assert real.peak == fake.peak > 64 * 128 * 4


def tiny(loops, backprop, **train):
    """loom-tiny at 8 x 64 bytes."""
    config = preset("loom-tiny").replace("model", vocab_size=256, loops=loops, seq_len=64)
    return config.replace("train", backprop=backprop, batch_size=8, precision="fp32", **train)


def peak(config) -> int:
    """Peak bytes of one batch's segments with weights and gradients, in real memory."""
    torch.manual_seed(0)
    x = torch.randint(0, 256, (8, 64))
    with LiveBytes() as live:
        model = LoopLM(config.model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        state = None
        for segment in segments(config.train, config.model.loops):
            state = run_segment(model, config, segment, MicroBatch(x, x), state).state
    return live.peak


def test_segments_do_not_grow_with_the_loops():
    """Real tensors: H = 3 to 12 within 10%, and at 12 at most 0.40 of full backprop."""
    peaks = [peak(tiny(h, "segments")) for h in (3, 6, 12)]
    assert max(peaks) < 1.1 * min(peaks)
    assert peaks[-1] < 0.4 * peak(tiny(12, "full"))


def test_recomputing_takes_less_memory():
    none, by_visit, by_loop = (
        peak(tiny(6, "full", recompute=r)) for r in ("none", "visit", "loop")
    )
    assert by_visit < 0.6 * none and by_loop < 0.6 * none


def counted(config, kind="cuda") -> float:
    """Peak bytes of a step with the run's own micro-batch."""
    rows = config.train.micro_batch or config.train.batch_size
    target = Target(DEVICES["h200"], MEASURED, kind)
    return count(config, target, timed=False).memory(rows).peak


def test_a_329m_loom_in_segments_fits_where_full_backprop_does_not():
    """Fake tensors, 16 x 1024 tokens, weights and moments included.

    Two layers of its ten, to be quick: `python -m bench.experiments.memory` counts them all.
    """
    base = preset("loom-329m").replace("train", precision="bf16", batch_size=16, micro_batch=0)
    base = base.replace("model", n_layers=2)
    peaks = {h: counted(base.replace("model", loops=h)) for h in (3, 6)}
    assert peaks[6] == pytest.approx(peaks[3], rel=0.1)
    full = counted(base.replace("model", loops=12).replace("train", backprop="full"))
    assert peaks[6] < 0.4 * full


def allocated(config, folder, corpus_file) -> int:
    """Peak bytes of PyTorch's allocator over the trainer's first two steps, model included."""
    config = config.replace("data", path=str(corpus_file)).replace("train", out=str(folder))
    now = peak = 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer = open_run(config, Console(quiet=True))
        trainer.speed.start()
        for _ in range(2):
            trainer.step(observe=False)
    trainer.lock.close()
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


GPT2 = {"d_model": 128, "n_heads": 2, "vocab_size": 16384, "seq_len": 288, "qk_norm": True}
GPT2 |= {"loops": 2}
RUNS = {
    "deeploop, last loop": ("deeploop-tiny", {}, {"backprop": "last", "backprop_loops": 1}),
    "deeploop, loops recomputed": ("deeploop-tiny", {}, {"recompute": "loop"}),
    "gpt2-like, full": ("gpt2-small-r3-baseline", GPT2 | {"n_layers": 2}, {"micro_batch": 0}),
    "gpt2-like, accumulated": ("deeploop-tiny", GPT2, {"micro_batch": 2}),
    "loom, accumulated segments": (
        "loom-tiny",
        {"loops": 3, "n_layers": 1},
        {"batch_size": 12, "micro_batch": 1, "backprop_loops": 1},
    ),
    "loom, a step a batch": ("loom-tiny", {"loops": 3}, {"step_per": "batch", "micro_batch": 2}),
    "released loom, visits recomputed": (
        "loom-tiny-released",
        {"loops": 3},
        {"recompute": "visit"},
    ),
    "native loop, full": ("loom-tiny-native", {"loops": 2}, {"backprop": "full"}),
}


@pytest.mark.parametrize("run", RUNS)
def test_a_counted_step_has_the_bytes_that_a_real_one_allocates(run, tmp_path, corpus_file):
    """Within 2%; only the temporary memory of some operators is estimated."""
    name, model, train = RUNS[run]
    config = preset(name).replace("model", **{"loops": 4, "vocab_size": 256} | model)
    config = config.replace("data", tokenizer="byte")
    shared = {"batch_size": 6, "precision": "fp32", "backprop_loops": 2, "device": "cpu"}
    config = config.replace("train", **shared | train)
    real = allocated(config, tmp_path / "run", corpus_file)
    assert counted(config, "cpu") == pytest.approx(real, rel=0.02)


def test_one_count_gives_every_size_of_micro_batch():
    """To the byte the figures of a count at that size."""
    base = tiny(2, "full")
    memory = step_memory(base.replace("train", batch_size=64, micro_batch=4), "cuda")
    for size in (3, 12):
        counted_there = step_memory(base.replace("train", batch_size=64, micro_batch=size), "cuda")
        assert memory.at(size) == counted_there.at(size)


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 480])
def test_the_size_that_runs_divides_no_other(rows):
    for config in presets().values():
        m = config.model
        unit = recognisable_batch(rows, m, 1334)
        sizes = (m.d_model, 3 * m.d_model, m.ff_width, m.seq_len, m.vocab_size, m.moe.d_expert)
        assert unit >= rows and all(n % unit for n in sizes if n)


@pytest.mark.parametrize(("vocab", "seq_len"), [(65536, 1024), (65536, 2048), (2**27, 128)])
def test_sequences_of_whole_chunks_have_a_recognisable_size(vocab, seq_len):
    """No rows are left over for a last chunk, whatever the micro-batch."""
    m = preset("deeploop-tiny").replace("model", vocab_size=vocab, seq_len=seq_len).model
    assert recognisable_batch(8, m, chunk_rows(m, "cuda")) == 11


@pytest.mark.parametrize(("loops", "size"), [(1, 3), (3, 3), (6, 3), (7, 3), (12, 3), (12, 1)])
def test_distinct_segments_stand_for_all_of_them(loops, size):
    listed = segments(tiny(loops, "segments", backprop_loops=size).train, loops)
    simulated = distinct(listed)
    assert sum(times for _, times in simulated) == len(listed)
    assert sum(times * len(segment.loops) for segment, times in simulated) == loops
    assert simulated[0][0] == listed[0]
