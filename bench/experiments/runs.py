"""Training runs for the experiments: each in a process, all results in one JSON file.

A run is named by the flags of `deeploop train` that repeat it, steps and seed included; that
line is its key in the file. Only runs that the file lacks are trained, so a sweep can be stopped
at any time and seeds can be added later.
"""

import functools
import json
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.harness.stored import read_json
from deeploop.cli.train import parse_train
from deeploop.eval.validate import bits_per_byte
from deeploop.model.looplm import count_parameters
from deeploop.train.setup import open_run
from deeploop.utils.device import device_name
from deeploop.utils.disk import write_text
from deeploop.utils.errors import Diverged, InputError
from deeploop.utils.processes import worker_pool

Result = dict[str, Any]
Results = dict[str, Result]
LAST_STEP = ("residual_rms", "router_overlap", "load_spread")  # metrics of a run's last step


def train(run: str, scratch: str | None = None) -> Result | None:
    """Train one run in this process.

    Args:
        run: flags of `deeploop train`.
        scratch: folder for the run's temporary folder; by default the system's.

    Returns:
        The figures of its end, or the reason why it diverged; None if a signal stopped it.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        flags = ["--train.eval-every", "0", "--train.save-every", "0", "--out", f"{folder}/run"]
        config = parse_train(run.split() + flags).config
        trainer = open_run(config, Console(quiet=True))
        about: Result = {
            "parameters": count_parameters(trainer.model),
            "precision": trainer.config.train.precision,
            "device": device_name(trainer.device),
            "torch": torch.__version__,
        }
        if "unigram" in trainer.floors:
            floor = bits_per_byte(trainer.floors["unigram"], trainer.corpus)
            about = {"unigram_bits_per_byte": floor} | about
        try:
            with trainer.lock:
                if trainer.run_steps() is not None:
                    return None
        except Diverged as error:
            return {"diverged": str(error)} | about
        steps = [line for line in trainer.metrics.read() if "loss" in line]
        last = {name: steps[-1][name] for name in LAST_STEP if name in steps[-1]}
        losses = [[m["step"], round(m["loss"], 4)] for m in steps]
        _, loss, figures = trainer.validated

        def bits(nats: float) -> float | None:
            return bits_per_byte(nats, trainer.corpus, config.train.eval_tokens)

        held_out: Result = {"val_bits_per_byte": bits(loss)}
        if "val_loop_losses" in figures:
            held_out["val_loop_bits_per_byte"] = [bits(x) for x in figures["val_loop_losses"]]
        if "val_loop_accuracies" in figures:  # of a task, which has no bytes
            held_out = {"val_loop_accuracies": figures["val_loop_accuracies"]}
        return held_out | {"losses": losses} | last | about


def with_seeds(cases: Iterable[str], seeds: int) -> list[str]:
    """List the runs of every case, one seed of all before the next.

    So a sweep that is stopped has about as many seeds of each case.
    """
    unique = list(dict.fromkeys(cases))
    return [f"{case} --seed {seed}" for seed in range(seeds) for case in unique]


def by_seed(results: Results, case: str) -> dict[int, Result]:
    """Select the results of one case, by seed."""
    split = [(run.rpartition(" --seed "), result) for run, result in results.items()]
    return {int(seed): result for (head, _, seed), result in split if head == case}


def load(file: Path) -> Results:
    """Read a file of results; raises InputError if it is not one."""
    try:
        return {run: dict(result) for run, result in read_json(file).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: is not a file of runs ({error})") from error


def save(results: Results, file: Path) -> None:
    """Write a file of results, a line for each run."""
    lines = [f"{json.dumps(run)}: {json.dumps(result)}" for run, result in results.items()]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, "{\n" + ",\n".join(lines) + "\n}\n")


def sweep(runs: Sequence[str], file: Path, jobs: int) -> Results:
    """Train the runs that the file lacks, `jobs` at a time, each on its share of the cores."""
    results = load(file) if file.exists() else {}
    missing = [run for run in runs if run not in results]
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = worker_pool(jobs, functools.partial(torch.set_num_threads, threads))
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
                figures = [v for name, v in result.items() if name.startswith("val_")]
                reached = figures[0] if figures else "diverged"
                print(f"{done}/{len(missing)}  {waiting[future]}  {reached}", flush=True)
        except BaseException:
            for worker in multiprocessing.active_children():
                worker.kill()  # a queue of runs would go on
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return results
