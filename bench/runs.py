"""Runs of the trainer, a process each, kept in one JSON file as each of them ends.

A run is written as the flags of `deeploop train` that repeat it, steps and seed among
them; that line is its key in the file. Only runs that the file lacks are trained, so a
sweep may be stopped at any time and seeds may be added later.
"""

import json
import multiprocessing
import os
import signal
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from deeploop.cli.train import parse_train
from deeploop.eval.validate import bits_per_byte
from deeploop.model.looplm import count_parameters
from deeploop.train.setup import open_run
from deeploop.utils.device import device_name
from deeploop.utils.disk import write_text
from deeploop.utils.errors import Diverged, InputError

Result = dict[str, Any]
Results = dict[str, Result]
KEPT = ("residual_rms", "router_overlap", "load_spread")  # of the last step


def train(run: str, scratch: str | None = None) -> Result | None:
    """One run in this process: what it reached, or why it diverged; None if a signal ended it.

    Its folder is a temporary one in `scratch`, or where the system has those.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        ends = ["--train.eval-every", "0", "--train.save-every", "0", "--out", f"{folder}/run"]
        config = parse_train(run.split() + ends).config
        trainer = open_run(config, Console(quiet=True))
        about: Result = {
            "unigram_bits_per_byte": bits_per_byte(trainer.floors["unigram"], trainer.corpus),
            "parameters": count_parameters(trainer.model),
            "precision": trainer.config.train.precision,
            "device": device_name(trainer.device),
            "torch": torch.__version__,
        }
        try:
            with trainer.lock:
                if trainer.run_steps() is not None:
                    return None
        except Diverged as error:
            return {"diverged": str(error)} | about
        lines = trainer.metrics.read()
        bits = bits_per_byte(trainer.validated[1], trainer.corpus)
        losses = [[m["step"], round(m["loss"], 4)] for m in lines if "loss" in m]
        last = next(m for m in reversed(lines) if "loss" in m)
        end = {"val_bits_per_byte": bits, "losses": losses}
        return end | {name: last[name] for name in KEPT if name in last} | about


def each(cases: Iterable[str], seeds: int) -> list[str]:
    """The runs of every case, one seed of all before the next: what is there is balanced."""
    unique = list(dict.fromkeys(cases))
    return [f"{case} --seed {seed}" for seed in range(seeds) for case in unique]


def by_seed(results: Results, case: str) -> dict[int, Result]:
    """The results of one case that are there."""
    split = [(run.rpartition(" --seed "), result) for run, result in results.items()]
    return {int(seed): result for (head, _, seed), result in split if head == case}


def load(file: Path) -> Results:
    """A file of results; raises InputError where it is none."""
    try:
        found = json.loads(file.read_text())
        return {run: dict(result) for run, result in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: not a readable file of runs ({error})") from error


def save(results: Results, file: Path) -> None:
    """A line for each run."""
    lines = [f"{json.dumps(run)}: {json.dumps(result)}" for run, result in results.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "{\n" + ",\n".join(lines) + "\n}\n")


def sweep(runs: Sequence[str], file: Path, jobs: int) -> Results:
    """Train what the file lacks, `jobs` runs at a time, each on its share of the cores."""
    results = load(file) if file.exists() else {}
    missing = [run for run in runs if run not in results]
    pool = ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(max(1, (os.cpu_count() or 1) // jobs),),
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt, too
    with tempfile.TemporaryDirectory() as scratch:
        try:
            waiting = {pool.submit(train, run, scratch): run for run in missing}
            for done, future in enumerate(as_completed(waiting), 1):
                result = future.result()
                if result is None:
                    continue
                results[waiting[future]] = result
                save(results, file)
                reached = result.get("val_bits_per_byte", "diverged")
                print(f"{done}/{len(missing)}  {waiting[future]}  {reached}", flush=True)
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.kill()  # a queue of runs would go on
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return results


def spread(values: Sequence[float], digits: str = ".3f") -> str:
    """Mean (lowest to highest); one value alone, or nothing, as it is."""
    if len(values) < 2:
        return f"{values[0]:{digits}}" if values else ""
    low, high = min(values), max(values)
    return f"{statistics.mean(values):{digits}} ({low:{digits}} to {high:{digits}})"
