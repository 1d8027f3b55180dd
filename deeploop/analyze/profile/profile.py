"""`deeploop profile`: real training steps, timed, then taken apart.

The trainer of `deeploop train` steps on this machine's device, three times over:

1. warm-up: compilation, the allocator, the optimizer's moments;
2. timed: nobody watches, so that step time and tokens/s are training's own;
3. traced: under torch's profiler, which slows the host. The split of time and the curve
   of memory are of these steps, and what the profiler cost is said beside them.

The folder then holds profile.json (every figure), trace.json.gz (for ui.perfetto.dev or
chrome://tracing), profile.png (one page) and, on CUDA, memory.pickle: the allocator's
history of one more step, for pytorch.org/memory_viz. It is no run, and nothing resumes it.
A trace takes some 300 kB, unpacked, for each visit of each micro-batch: where a step
accumulates many, lower train.batch_size.

Tokens are drawn from the seed unless data.path names a corpus: no time depends on what
they say but that of experts, on how evenly they are routed.

Its CUDA side has not yet run on a GPU.
"""

import contextlib
import dataclasses
import itertools
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, schedule

from deeploop.analyze.plan.hardware import device_of
from deeploop.analyze.profile import trace
from deeploop.analyze.profile.telemetry import Sample, columns, reader, sampled
from deeploop.config import Config
from deeploop.data.corpus import Corpus
from deeploop.data.shards import ArraySegment, TokenStream
from deeploop.data.tokenizer import load_tokenizer
from deeploop.model.flops import flops_per_token
from deeploop.runs.folder import choose_run_folder, lock_run_folder
from deeploop.train import setup
from deeploop.train.trainer import Trainer
from deeploop.utils.console import print_whole
from deeploop.utils.device import device_name, peak_memory
from deeploop.utils.disk import disk_errors, write_json
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import InputError
from deeploop.utils.spans import PARTS, span
from deeploop.utils.versions import versions

PAGE = "profile.png"  # written last
WINDOWS = 64  # sequences of random tokens; steps go round them
HISTORY = 1_000_000  # newest changes of the allocator that its history keeps


class Steps(NamedTuple):
    """How many steps of each kind, each at least 1."""

    warmup: int
    timed: int
    traced: int

    @property
    def total(self) -> int:
        return sum(self) + 2  # one warms up the profiler, one is for the allocator's history


def open_profile(config: Config, steps: Steps, console: Console, ranks: Ranks) -> Trainer:
    """The trainer to profile, its folder held.

    Raises InputError on what `train` refuses, and on fewer than one step of a kind.
    """
    for name, count in steps._asdict().items():
        if count < 1:
            raise InputError(f"{name}={count}: must be at least 1 step")
    corpus = setup.open_corpus(config) if config.data.path else random_corpus(config)
    config = setup.resolve(config, corpus, ranks)
    name = config.train.out or f"profiles/{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    # With as many steps as there will be: the learning rate is a function of them.
    config = config.replace("train", steps=steps.total, out=name)
    folder = choose_run_folder(config) if ranks.is_main else Path(name)
    trainer = Trainer(config, corpus, {}, folder, console, ranks)
    if ranks.is_main:
        trainer.lock.enter_context(held(folder))
    return trainer


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a new folder; leave none behind where no profile came of it."""
    with lock_run_folder(folder, new=True):
        try:
            yield
        finally:
            if not (folder / PAGE).exists():
                shutil.rmtree(folder, ignore_errors=True)


def random_corpus(config: Config) -> Corpus:
    """Tokens drawn evenly from the model's vocabulary; where that is 0, the tokenizer's."""
    vocab = config.model.vocab_size or load_tokenizer(config.data.tokenizer).vocab_size
    drawn = np.random.default_rng(config.train.seed).integers(
        vocab, size=WINDOWS * config.model.seq_len + 1, dtype=np.uint32
    )
    stream = TokenStream([ArraySegment("random tokens", drawn)], vocab)
    return Corpus("random tokens", stream, stream, vocab)


def profile(trainer: Trainer, steps: Steps) -> dict[str, Any]:
    """Take the steps and write the folder; returns what profile.json holds.

    Every rank takes the same steps; the first alone writes, and returns figures.
    """
    folder = trainer.folder
    with trainer.lock:
        advance(trainer, steps.warmup)
        telemetry = reader(trainer.device)
        with sampled(telemetry) as samples:
            times = step_times(trainer, steps.timed)
        figures = {
            **described(trainer),
            **speed(trainer, times),
            "peak_memory_gib": peak_memory(trainer.device),
            "telemetry": telemetry if isinstance(telemetry, str) else columns(samples),
        }
        traced = record(trainer, steps.traced)
        if trainer.device.type == "cuda":
            record_allocator(trainer, folder / "memory.pickle")
        if not trainer.ranks.is_main:
            return {}
        path = folder / "trace.json.gz"
        with disk_errors(str(path)):
            traced.export_chrome_trace(str(path))
        taken = taken_apart(trace.read(path), trainer)
        figures |= taken.figures
        write_json(folder / "profile.json", figures)
        from deeploop.analyze import plots  # matplotlib is slow to import

        plots.profile(figures, taken.curve, taken.stretches, folder / PAGE)
    return figures


def advance(trainer: Trainer, count: int = 1) -> None:
    """Take some steps, and wait for the device."""
    for _ in range(count):
        trainer.step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def step_times(trainer: Trainer, count: int) -> list[float]:
    """Seconds of each of some steps, one behind the other as in training.

    On CUDA by events on its stream, so that nothing waits in between; its peak of memory
    is that of these steps afterwards.
    """
    if trainer.device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            advance(trainer)
            marks.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(marks)]
    torch.cuda.reset_peak_memory_stats(trainer.device)
    stream = torch.cuda.current_stream(trainer.device)
    events = [stream.record_event(torch.cuda.Event(enable_timing=True))]
    for _ in range(count):
        trainer.step()
        events.append(stream.record_event(torch.cuda.Event(enable_timing=True)))
    torch.cuda.synchronize(trainer.device)
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(events)]


def record(trainer: Trainer, count: int) -> torch.profiler.profile:
    """Steps under torch's profiler, each in a span "step" that ends when the device does."""
    seen = [ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        seen.append(ProfilerActivity.CUDA)
    plan = schedule(wait=0, warmup=1, active=count, repeat=1)
    with torch.profiler.profile(activities=seen, schedule=plan, profile_memory=True) as profiler:
        advance(trainer)
        for _ in range(count):
            profiler.step()
            with span("step"):
                advance(trainer)
    return profiler


def record_allocator(trainer: Trainer, path: Path) -> None:
    """The CUDA allocator's history of one step, with the stack of each change, to a file."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY)
    advance(trainer)
    if trainer.ranks.is_main:
        with disk_errors(str(path)):
            torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def described(trainer: Trainer) -> dict[str, Any]:
    """What was profiled, where, and with what."""
    return {
        "preset": trainer.config.preset,
        "device": device_name(trainer.device),
        "ranks": trainer.ranks.world,
        "versions": versions(),
        "config": dataclasses.asdict(trainer.config),
    }


def speed(trainer: Trainer, times: list[float]) -> dict[str, Any]:
    """Step time, tokens/s over all ranks and, where the device's peak is known, MFU."""
    config, seconds = trainer.config, statistics.median(times)
    rate = trainer.speed.tokens / seconds
    flops = flops_per_token(config)
    found = device_of(device_name(trainer.device))
    figures = {
        "step_ms": seconds * 1e3,
        "step_ms_each": [s * 1e3 for s in times],
        "tokens_per_second": rate,
        "flops_per_token": flops,
    }
    if found is not None:
        peak = found.bf16 if config.train.precision == "bf16" else found.fp32
        figures["mfu"] = rate * flops / (peak * trainer.ranks.world)
    return figures


class Taken(NamedTuple):
    """The traced steps, taken apart."""

    figures: dict[str, Any]
    curve: list[tuple[float, int]]  # (ms, bytes), of the last step
    stretches: list[trace.Stretch]


def taken_apart(events: list[trace.Event], trainer: Trainer) -> Taken:
    """Split of time, mean over the traced steps; memory over the last of them."""
    cuda = trainer.device.type == "cuda"
    found = [(step, trace.within(events, step)) for step in trace.steps(events)]
    parts: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for step, inside in found:
        for label, ms in trace.split(inside, step).items():
            parts[label.part][label.phase] += ms / len(found)
    step, inside = found[-1]
    curve = trace.memory(inside, step, cuda, state_bytes(trainer))
    stretches = trace.stretches(inside, step, curve)
    peaks: dict[str, int] = defaultdict(int)
    for s in stretches:
        peaks[s.name] = max(peaks[s.name], s.peak)
    figures = {
        "traced_steps": len(found),
        "traced_step_ms": sum(step["dur"] for step, _ in found) / 1e3 / len(found),
        "clock": "GPU kernels" if trace.has_kernels(inside) else "the host's main thread",
        "parts_ms": {p: parts[p] for p in (*PARTS, "other", "idle") if p in parts},
        "memory_gib": {
            "at_start": curve[0][1] / 2**30,
            "peak": max(held for _, held in curve) / 2**30,
            **{name: peak / 2**30 for name, peak in peaks.items()},
        },
    }
    return Taken(figures, curve, stretches)


def state_bytes(trainer: Trainer) -> int:
    """Bytes held between steps: weights, buffers and the optimizer's moments."""
    kept = [*trainer.model.parameters(), *trainer.model.buffers()]
    for state in trainer.optimizer.state.values():
        kept += [x for x in state.values() if isinstance(x, torch.Tensor)]
    storages = (x.untyped_storage() for x in kept)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def report(figures: dict[str, Any], folder: Path, console: Console) -> None:
    """The figures, in a screenful."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    each, mfu = figures["step_ms_each"], figures.get("mfu")
    used = "" if mfu is None else f", MFU {mfu:.1%}"
    cost = figures["traced_step_ms"] / figures["step_ms"] - 1
    say(
        f"step     {figures['step_ms']:.1f} ms, median of {len(each)} ({min(each):.1f} to "
        f"{max(each):.1f}); {figures['tokens_per_second']:,.0f} tokens/s{used}"
    )
    say(
        f"traced   {figures['traced_step_ms']:.1f} ms, {cost:+.0%} by the profiler; "
        f"split below by {figures['clock']}"
    )
    print_whole(console, table(figures["parts_ms"]))
    memory = dict(figures["memory_gib"])
    say(f"memory   {memory.pop('peak'):.3f} GiB peak, {memory.pop('at_start'):.3f} at the start")
    for name, peak in memory.items():
        say(f"         {peak:.3f} {name}")
    readings = figures["telemetry"]
    if isinstance(readings, dict):
        most = (f"{name} up to {max(readings[name]):,.1f}" for name in Sample._fields[1:])
        readings = ", ".join(most)
    say(f"GPU      {readings}")
    say(f"folder   {folder}: {PAGE}, profile.json, trace.json.gz")


def table(parts: dict[str, dict[str, float]]) -> Table:
    """Milliseconds by part and phase, and each part's share of the step."""
    phases = [p for p in trace.PHASES if any(p in by for by in parts.values())]
    total = sum(sum(by.values()) for by in parts.values())
    made = Table(box=None, pad_edge=False, show_footer=True)
    made.add_column("ms", "sum")
    for phase in phases:
        whole = sum(by.get(phase, 0) for by in parts.values())
        made.add_column(phase, f"{whole:.1f}", justify="right")
    made.add_column("sum", f"{total:.1f}", justify="right")
    made.add_column("share", "100%", justify="right")
    for part, by in parts.items():
        cells = [f"{by[p]:.1f}" if p in by else "" for p in phases]
        whole = sum(by.values())
        made.add_row(part, *cells, f"{whole:.1f}", f"{whole / total:.1%}")
    return made
