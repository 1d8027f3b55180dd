"""Evaluate a reasoner by number of segments: `deeploop eval RUN`.

`deeploop.eval.boards` defines the figures. Two ways to answer are compared in time: all examples
through every segment, as HRM and TRM are evaluated, and each until its Q head halts it.
"""

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from deeploop.analyze.diagnose.diagnose import output_folder
from deeploop.config import Config
from deeploop.data.puzzles.puzzle_set import Examples
from deeploop.data.puzzles.source import PuzzleSource, open_source
from deeploop.eval.boards import answer, by_segment
from deeploop.eval.validate import held_out_targets
from deeploop.model.reasoner import Reasoner
from deeploop.runs import checkpoint
from deeploop.train.setup import check_same_corpus
from deeploop.train.trainer import load_average
from deeploop.utils.console import print_whole, say
from deeploop.utils.device import device_name, pick_device
from deeploop.utils.disk import write_json

TIMED = 3  # passes of each way of answering, by turns; the fastest counts


def evaluate_reasoner(
    ckpt: checkpoint.Checkpoint,
    console: Console,
    path: Path,
    tokens: int,
    batch_size: int,
    data: str,
    device: str,
) -> dict[str, Any]:
    """Measure a reasoner after each of its segments; writes PATH.json and PATH.png.

    Args:
        ckpt: of a reasoner's run; the average of its weights is measured where it has one.
        console: prints the table.
        path: of the files to write, without their endings.
        tokens: cells of held-out examples to read; 0: all.
        batch_size: examples at once.
        data: a folder of puzzles; empty: the run's.
        device: auto, cpu, cuda or cuda:N.

    Returns:
        What the JSON file has. Raises InputError on data that are not the run's.
    """
    torch_device = pick_device(device, "device")
    config = ckpt.config.replace("train", device=str(torch_device), compile=False)
    corpus = open_source(data or config.data.puzzles)
    if not data:
        check_same_corpus(corpus, ckpt)
    with output_folder(path.parent, unique=False):
        figures = measure(ckpt, config, corpus, console, torch_device, tokens, batch_size)
        write_json(path.with_name(f"{path.name}.json"), figures)
        from deeploop.analyze import plots  # matplotlib is slow to import

        plots.by_segment(figures, path.with_name(f"{path.name}.png"))
    say(console, f"wrote    {path}.json and {path.name}.png")
    return figures


def measure(
    ckpt: checkpoint.Checkpoint,
    config: Config,
    corpus: PuzzleSource,
    console: Console,
    device: torch.device,
    tokens: int,
    batch_size: int,
) -> dict[str, Any]:
    """Measure a checkpoint's model and print the table; returns what the JSON file has."""
    model = load_reasoner(ckpt, device)
    count = held_out_targets(corpus, tokens)
    say(console, f"model    {config.preset}: {model.describe()}, step {ckpt.step}")
    say(console, f"data     {corpus.describe()}; {-(-count // corpus.seq_len):,} are read")
    measured = by_segment(model, corpus, config, batch_size, tokens=tokens)
    assert measured is not None
    figures: dict[str, Any] = {
        "checkpoint": str(ckpt.path),
        "preset": config.preset,
        "step": ckpt.step,
        "data": corpus.name,
        "cells": count,
        "precision": config.train.precision,
        "device": device_name(device),
        "torch": torch.__version__,
        **measured._asdict(),
        **times(model, config, next(corpus.held_out_examples(batch_size, count))),
    }
    print_whole(console, table(figures))
    say(
        console,
        f"halted   after {figures['mean_segments']:.2f} segments in the mean, exact "
        f"{figures['early_exact']:.2%}; a batch takes {figures['early_ms']:,.0f} ms, and "
        f"{figures['all_ms']:,.0f} ms through all segments",
    )
    return figures


def load_reasoner(ckpt: checkpoint.Checkpoint, device: torch.device) -> Reasoner:
    """Load a checkpoint's model in eval mode, with the average of its weights if it has one."""
    model = Reasoner(ckpt.config.model)
    checkpoint.load_weights(ckpt, model)
    load_average(ckpt, model)
    return model.to(device).eval()


def times(model: Reasoner, config: Config, examples: Examples) -> dict[str, float]:
    """Return the milliseconds of a batch with and without halting, each the best of a few."""
    batch = Examples(*(x.to(model.head.device) for x in examples))
    best = {"early_ms": float("inf"), "all_ms": float("inf")}
    for _ in range(TIMED):
        for name, early in (("early_ms", True), ("all_ms", False)):
            start = time.perf_counter()
            labels, _ = answer(model, config, batch, early)
            labels.cpu()  # waits for the device
            best[name] = min(best[name], 1000 * (time.perf_counter() - start))
    return best


def table(figures: dict[str, Any]) -> Table:
    """Make a table with a row for each segment."""
    rows = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("segments", "loss", "cells right", "exact", "would have halted"):
        rows.add_column(name, justify="right", no_wrap=True)
    columns = (figures[name] for name in ("loss", "token", "exact", "wants"))
    for i, (loss, token, exact, wants) in enumerate(zip(*columns, strict=True), 1):
        rows.add_row(str(i), f"{loss:.4f}", f"{token:.2%}", f"{exact:.2%}", f"{wants:.1%}")
    return rows
