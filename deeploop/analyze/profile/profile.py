"""Profile training steps: `deeploop profile`.

The trainer of `deeploop train` takes steps on this machine's device, in three rounds:

1. warm-up: compilation, the allocator, the optimizer's moments;
2. timed: without a profiler, so that step time and tokens/s are those of training;
3. traced: under torch's profiler, which slows the host down. The split of time and the curve of
   memory are of these steps; the profiler's cost is printed beside them.

The folder then holds profile.json (all figures), trace.json.gz (for ui.perfetto.dev or
chrome://tracing), profile.png (one page) and, on CUDA, memory.pickle: the allocator's history of
one more step, for pytorch.org/memory_viz. It is not a run and cannot be resumed. A trace takes
about 300 kB, unpacked, for each visit of each micro-batch: where a step accumulates many, lower
train.batch_size.

Tokens are drawn from the seed unless data.path names a corpus. Time does not depend on their
values, except for experts, through load balance.

The CUDA code has not yet run on a GPU.
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
from deeploop.analyze.profile.telemetry import Sample, columns, gpu_reader, sampling
from deeploop.config import Config
from deeploop.data.corpus import Corpus
from deeploop.data.stream import ArraySegment, TokenStream
from deeploop.data.tokenizer import load_tokenizer
from deeploop.model.flops import flops_per_token
from deeploop.runs.folder import choose_run_folder, claim_folder, lock_run_folder
from deeploop.train import setup
from deeploop.train.parents import find_parents
from deeploop.train.trainer import Trainer
from deeploop.utils.console import print_whole, say
from deeploop.utils.device import device_name, peak_memory
from deeploop.utils.disk import disk_errors, write_json
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import InputError
from deeploop.utils.spans import COMPONENTS, span
from deeploop.utils.versions import versions

PAGE = "profile.png"  # written last
WINDOWS = 64  # sequences of random tokens; steps go round them
HISTORY = 1_000_000  # the newest entries of the allocator's history that are recorded


class Steps(NamedTuple):
    """Number of steps of each kind, each at least 1."""

    warmup: int
    timed: int
    traced: int

    @property
    def total(self) -> int:
        """Number of all steps, with the two that are not counted by kind."""
        return sum(self) + 2  # one warms up the profiler, one is for the allocator's history


def open_profile(config: Config, steps: Steps, console: Console, ranks: Ranks) -> Trainer:
    """Make the trainer to profile and lock its new folder.

    Raises InputError on input that `train` refuses, and on fewer than one step of a kind.
    """
    for name, count in steps._asdict().items():
        if count < 1:
            raise InputError(f"{name}={count}: must be at least 1 step")
    # The learning rate is a function of the number of steps.
    config = config.replace("train", steps=steps.total)
    setup.check_memory(config, ranks)
    named = config.data.path or config.data.task or config.data.puzzles
    corpus = setup.open_corpus(config) if named else random_corpus(config)
    config = setup.resolve(config, corpus, ranks)
    setup.check_memory(config, ranks)  # the vocabulary is now known
    folder = choose_run_folder(config, "profiles") if ranks.is_main else Path(config.train.out)
    trainer = setup.trainer_class(config)(config, corpus, {}, folder, console, ranks)
    trainer.learn_from(find_parents(config, corpus, started=True))  # its weights change no time
    if ranks.is_main:
        if not config.train.out:
            trainer.folder = claim_folder(folder)
        trainer.lock.enter_context(new_folder(trainer.folder))
    return trainer


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make and lock a folder; remove it at the end if no profile was written to it."""
    with lock_run_folder(folder, new=True):
        try:
            yield
        finally:
            if not (folder / PAGE).exists():
                shutil.rmtree(folder, ignore_errors=True)


def random_corpus(config: Config) -> Corpus:
    """Draw tokens evenly from the model's vocabulary; where that is 0, from the tokenizer's."""
    vocab = config.model.vocab_size or load_tokenizer(config.data.tokenizer).vocab_size
    drawn = np.random.default_rng(config.train.seed).integers(
        vocab, size=WINDOWS * config.model.seq_len + 1, dtype=np.uint32
    )
    stream = TokenStream([ArraySegment("random tokens", drawn)], vocab)
    return Corpus("random tokens", stream, stream, vocab)


def profile(trainer: Trainer, steps: Steps) -> dict[str, Any]:
    """Take the steps and write the folder; returns the figures of profile.json.

    Every rank takes the same steps. Only the first writes and returns figures; the others
    return an empty dict.
    """
    folder = trainer.folder
    with trainer.lock:
        take_steps(trainer, steps.warmup)
        telemetry = gpu_reader(trainer.device)
        with sampling(telemetry) as samples:
            times = step_times(trainer, steps.timed)
        figures = {
            **setup_figures(trainer),
            **speed_figures(trainer, times),
            "peak_memory_gib": peak_memory(trainer.device),
            "telemetry": telemetry if isinstance(telemetry, str) else columns(samples),
        }
        traced = trace_steps(trainer, steps.traced)
        if trainer.device.type == "cuda":
            record_allocator(trainer, folder / "memory.pickle")
        if not trainer.ranks.is_main:
            return {}
        path = folder / "trace.json.gz"
        with disk_errors(str(path), path):
            traced.export_chrome_trace(str(path))
        summary = summarise(trace.read(path), trainer)
        figures |= summary.figures
        write_json(folder / "profile.json", figures)
        from deeploop.analyze import plots  # matplotlib is slow to import

        plots.profile(figures, summary.curve, summary.sections, folder / PAGE)
    return figures


def take_steps(trainer: Trainer, count: int = 1) -> None:
    """Take some steps of training, and wait for the device."""
    for _ in range(count):
        trainer.step()
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)


def step_times(trainer: Trainer, count: int) -> list[float]:
    """Take steps one after the other, as in training; returns the seconds of each.

    On CUDA events on the stream take the time, so that nothing waits in between. The device's
    peak memory statistics then cover these steps.
    """
    if trainer.device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            take_steps(trainer)
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


def trace_steps(trainer: Trainer, count: int) -> torch.profiler.profile:
    """Take steps under torch's profiler, each in a span "step" that ends when the device does."""
    activities = [ProfilerActivity.CPU]
    if trainer.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=1, active=count, repeat=1),
        profile_memory=True,
    ) as profiler:
        take_steps(trainer)
        for _ in range(count):
            profiler.step()
            with span("step"):
                take_steps(trainer)
    return profiler


def record_allocator(trainer: Trainer, path: Path) -> None:
    """Write the CUDA allocator's history of one step to a file, with the stack of each entry."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY)
    take_steps(trainer)
    if trainer.ranks.is_main:
        with disk_errors(str(path), path):
            torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def setup_figures(trainer: Trainer) -> dict[str, Any]:
    """Return the configuration, the device and the versions of the software."""
    return {
        "preset": trainer.config.preset,
        "device": device_name(trainer.device),
        "ranks": trainer.ranks.world,
        "versions": versions(),
        "config": dataclasses.asdict(trainer.config),
    }


def speed_figures(trainer: Trainer, times: list[float]) -> dict[str, Any]:
    """Return step time, tokens/s over all ranks and, where the device's peak is known, MFU."""
    config, seconds = trainer.config, statistics.median(times)
    rate = trainer.speed.tokens / seconds
    flops = flops_per_token(config)
    device = device_of(device_name(trainer.device))
    figures = {
        "step_ms": seconds * 1e3,
        "step_ms_each": [s * 1e3 for s in times],
        "tokens_per_second": rate,
        "flops_per_token": flops,
    }
    if device is not None:
        peak = device.bf16 if config.train.precision == "bf16" else device.fp32
        figures["mfu"] = rate * flops / (peak * trainer.ranks.world)
    return figures


class TraceSummary(NamedTuple):
    """Time and memory of the traced steps."""

    figures: dict[str, Any]
    curve: list[tuple[float, int]]  # (ms, bytes), of the last step
    sections: list[trace.StepSection]


def summarise(events: list[trace.Event], trainer: Trainer) -> TraceSummary:
    """Split the time, as a mean over the traced steps, and the memory of the last of them."""
    cuda = trainer.device.type == "cuda"
    traced = [(step, trace.events_of(events, step)) for step in trace.steps(events)]
    by_component: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for step, inside in traced:
        for label, ms in trace.time_by_label(inside, step).items():
            by_component[label.component][label.phase] += ms / len(traced)
    step, inside = traced[-1]
    curve = trace.memory(inside, step, cuda, state_bytes(trainer))
    sections = trace.sections(inside, step, curve)
    peaks: dict[str, int] = defaultdict(int)
    for s in sections:
        peaks[s.name] = max(peaks[s.name], s.peak)
    order = (*COMPONENTS, "other", "idle")
    figures = {
        "traced_steps": len(traced),
        "traced_step_ms": sum(step["dur"] for step, _ in traced) / 1e3 / len(traced),
        "clock": "GPU kernels" if trace.has_kernels(inside) else "the host's main thread",
        "parts_ms": {name: by_component[name] for name in order if name in by_component},
        "memory_gib": {
            "at_start": curve[0][1] / 2**30,
            "peak": max(size for _, size in curve) / 2**30,
            **{name: peak / 2**30 for name, peak in peaks.items()},
        },
    }
    return TraceSummary(figures, curve, sections)


def state_bytes(trainer: Trainer) -> int:
    """Return the bytes that live between steps: weights, buffers and the optimizer's moments."""
    tensors = [*trainer.model.parameters(), *trainer.model.buffers()]
    for state in trainer.optimizer.state.values():
        tensors += [x for x in state.values() if isinstance(x, torch.Tensor)]
    storages = (x.untyped_storage() for x in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def report(figures: dict[str, Any], folder: Path, console: Console) -> None:
    """Print the figures."""
    each, mfu = figures["step_ms_each"], figures.get("mfu")
    used = "" if mfu is None else f", MFU {mfu:.1%}"
    cost = figures["traced_step_ms"] / figures["step_ms"] - 1
    say(
        console,
        f"step     {figures['step_ms']:.1f} ms, median of {len(each)} ({min(each):.1f} to "
        f"{max(each):.1f}); {figures['tokens_per_second']:,.0f} tokens/s{used}",
    )
    say(
        console,
        f"traced   {figures['traced_step_ms']:.1f} ms, {cost:+.0%} by the profiler; "
        f"split below by {figures['clock']}",
    )
    print_whole(console, table(figures["parts_ms"]))
    memory = dict(figures["memory_gib"])
    say(
        console,
        f"memory   {memory.pop('peak'):.3f} GiB peak, {memory.pop('at_start'):.3f} at the start",
    )
    for name, peak in memory.items():
        say(console, f"         {peak:.3f} {name}")
    readings = figures["telemetry"]
    if isinstance(readings, dict):
        most = (f"{name} up to {max(readings[name]):,.1f}" for name in Sample._fields[1:])
        readings = ", ".join(most)
    say(console, f"GPU      {readings}")
    say(console, f"folder   {folder}: {PAGE}, profile.json, trace.json.gz")


def table(by_component: dict[str, dict[str, float]]) -> Table:
    """Make a table of milliseconds by component and phase, and each component's share."""
    phases = [p for p in trace.PHASES if any(p in by_phase for by_phase in by_component.values())]
    total = sum(sum(by_phase.values()) for by_phase in by_component.values())
    rows = Table(box=None, pad_edge=False, show_footer=True)
    rows.add_column("ms", "sum")
    for phase in phases:
        ms = sum(by_phase.get(phase, 0) for by_phase in by_component.values())
        rows.add_column(phase, f"{ms:.1f}", justify="right")
    rows.add_column("sum", f"{total:.1f}", justify="right")
    rows.add_column("share", "100%", justify="right")
    for component, by_phase in by_component.items():
        cells = [f"{by_phase[p]:.1f}" if p in by_phase else "" for p in phases]
        ms = sum(by_phase.values())
        rows.add_row(component, *cells, f"{ms:.1f}", f"{ms / total:.1%}")
    return rows
