"""Time every launch setting of the row kernels on this GPU, against the fixed table.

    python -m bench.kernels.tune [--op post_sandwich ...] [--direction backward] [--d 768 4096]
                         [--rows 32768] [--dtype bf16] [--seconds 200] [--out tune.json]

kernels/_launch.py keeps one table of settings, fixed on purpose; this finds what
belongs in it. For each op, direction and width: every candidate is compiled (in
separate processes, before the timing; what spills or does not fit an SM is
left out), its results are compared with the default's, and it is timed as a CUDA
graph with L2 flushed, candidates taking turns; the best few once more, longer. A
backward is timed with the sums over its partial gradients, as the op runs it.

Prints the best few of each case with their share of the copy bandwidth, writes
all of it to --out after each case, and ends with a table for kernels/_launch.py: per
width and number of gains the setting with the best geometric mean over the ops.
Nothing begins after --seconds; the results so far are printed. Exit code 3: no GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import torch

from bench.harness.timing import copy_bandwidth, graphed, interleaved_on_device, relative_error
from bench.kernels import candidates as c
from bench.kernels.candidates import Case
from deeploop.kernels import aot
from deeploop.kernels._launch import LaunchConfig
from deeploop.utils.processes import worker_pool

Record = dict[str, Any]
DEVICE = "cuda"
TOLERANCE = {"bf16": 1e-2, "fp16": 1e-2, "fp32": 1e-4}
FINALISTS = 5
DEFAULT_OPS = [name for name in c.OPS if name != "inject"]  # its launches are those of pre_norm


# ---------------------------------------------------------------------------
# Compiling


def compile_one(case: Case, config: LaunchConfig) -> Record:
    """Compile as a launch would, into Triton's cache on disk; what the code needs."""
    launch = case.launch(DEVICE, config, n_rows=256)
    try:
        kernel = launch.kernel.warmup(**launch.args, grid=(1,), **launch.options)
        report = aot.read(kernel)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    return {
        "registers": report.registers,
        "spills": report.spills,
        "shared": report.shared,
    }


def start_compiling(pool: Executor, cases: list[Case]) -> dict[Case, dict[LaunchConfig, Future]]:
    """Start a compilation for each kernel, in the order of timing; equal configs share one."""
    futures: dict[Case, dict[LaunchConfig, Future]] = {}
    for case in cases:
        tasks: dict[Any, Future] = {}
        futures[case] = {}
        for config in c.configs(case):
            options = case.launch("meta", config).options
            alike = (config._replace(per_sm=0), *options.values())
            if alike not in tasks:
                tasks[alike] = pool.submit(compile_one, case, config)
            futures[case][config] = tasks[alike]
    return futures


def compiled(
    case: Case, tasks: dict[LaunchConfig, Future], deadline: float
) -> tuple[dict[LaunchConfig, Record], dict[str, str]]:
    """Return the configs to time with their registers, and the reason for each one left out."""
    usable: dict[LaunchConfig, Record] = {}
    skipped: dict[str, str] = {}
    for i, config in enumerate(c.configs(case)):
        needs = tasks[config].result(timeout=max(0.1, deadline - time.monotonic()))
        problem = needs.get("error")
        if problem is None and needs["spills"]:
            problem = f"{needs['spills']} spills"
        elif problem is None and not c.fits(config, needs["registers"], needs["shared"]):
            problem = "does not fit an SM"
        if problem is None or i == 0:
            usable[config] = needs
        else:
            skipped[str(config)] = problem
    return usable, skipped


# ---------------------------------------------------------------------------
# Timing


def replays(
    case: Case, usable: dict[LaunchConfig, Record], skipped: dict[str, str]
) -> tuple[dict[LaunchConfig, Any], int]:
    """Return a CUDA graph of every config that agrees with the default, and the bytes it moves."""
    first = next(iter(usable))
    default = case.launch(DEVICE, first)
    tensors = c.tensors_of(default)
    expected = c.results(case, c.with_tensors(default, tensors))
    stream = torch.cuda.Stream()
    graphs = {}
    for config in usable:
        try:
            launch = c.with_tensors(case.launch(DEVICE, config), tensors)
            pairs = zip(c.results(case, launch), expected, strict=True)
            error = max(relative_error(a, b) for a, b in pairs)
            if not error <= TOLERANCE[case.dtype]:
                raise ValueError(f"differs from the default by {error:.1e}")
            stream.wait_stream(torch.cuda.current_stream())
            graphs[config] = graphed(lambda launch=launch: c.run(launch), stream)
        except Exception as problem:
            if config == first:
                raise
            skipped[str(config)] = f"{type(problem).__name__}: {str(problem).splitlines()[:1]}"
    return graphs, c.bytes_of(c.with_tensors(default, tensors))


def time_case(
    case: Case, usable: dict[LaunchConfig, Record], skipped: dict[str, str]
) -> list[Record]:
    """Return every config's median time; the best few and the default are timed again, longer."""
    runs, n_bytes = replays(case, usable, skipped)
    seconds = {k: statistics.median(v) for k, v in interleaved_on_device(runs, rounds=7).items()}
    best = sorted(seconds, key=lambda config: seconds[config])[:FINALISTS]
    finals = {config: runs[config] for config in dict.fromkeys([*best, next(iter(usable))])}
    for config, times in interleaved_on_device(finals, rounds=25).items():
        seconds[config] = statistics.median(times)
    return [
        {
            "config": config._asdict(), "seconds": seconds[config], "final": config in finals,
            "gb_per_s": n_bytes / seconds[config] / 1e9, **usable[config],
        }
        for config in runs
    ]  # fmt: skip


# ---------------------------------------------------------------------------
# Printing


def setting(case: Case, config: dict[str, int]) -> Any:
    """The config as the table has it."""
    if case.direction == "forward":
        return config["rows"], config["warps"]
    return c.plan_of(LaunchConfig(**config), case.d)


def summary(record: Record) -> str:
    """The default and the best few of one case."""
    case, copy = Case(*record["case"]), record["copy_gb_per_s"]
    results = record["results"]
    finals = sorted((r for r in results if r["final"]), key=lambda r: r["seconds"])
    lines = [f"{case}: {len(results)} timed, {len(record['skipped'])} left out"]
    for r in finals:
        mark = "default" if r is results[0] else ""
        needs = f"{r.get('registers', '?')} registers, {r.get('shared', 0) >> 10} KiB shared"
        lines.append(
            f"  {r['gb_per_s'] / copy:5.0%} of copy {r['seconds'] * 1e6:8.1f} us  "
            f"{setting(case, r['config'])}, {needs} {mark}"
        )
    return "\n".join(lines)


def best_by_column(records: list[Record]) -> dict[tuple[str, int], tuple[Any, float, int]]:
    """For each column and width: the best setting timed in all its cases, and its mean loss.

    The loss of a setting in a case is its time over the best in that case; the mean is geometric.
    """
    losses: dict[tuple[str, int], dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    cases: dict[tuple[str, int], int] = defaultdict(int)
    for record in records:
        case = Case(*record["case"])
        column = c.OPS[case.op].column if case.direction == "backward" else "forward"
        key = (column, c.power(case.d))
        cases[key] += 1
        best = min(r["seconds"] for r in record["results"])
        for each in {setting(case, r["config"]): r["seconds"] for r in record["results"]}.items():
            losses[key][each[0]].append(math.log(each[1] / best))
    choices = {}
    for key, by_setting in losses.items():
        means = {s: sum(v) / len(v) for s, v in by_setting.items() if len(v) == cases[key]}
        chosen = min(means, key=lambda s: means[s])
        choices[key] = (chosen, math.exp(means[chosen]), cases[key])
    return choices


def paste(records: list[Record]) -> str:
    """Rows for the tables of kernels/_launch.py; what was not timed stays as it is."""
    best = best_by_column(records)

    def entry(column: str, block: int) -> str:
        chosen = best[column, block][0] if (column, block) in best else c.table()[column][block]
        values = [str(value) for value in chosen]
        return f"TilePlan({', '.join(values)})" if column != "forward" else f"({', '.join(values)})"

    lines = ["_BACKWARD = {"]
    for block in c.table()["one gain"]:
        plans = ", ".join(entry(column, block) for column in ("one gain", "two gains"))
        lines.append(f"    {block}: ({plans}),")
    lines += ["}", "_FORWARD = {"]
    lines += [f"    {block}: {entry('forward', block)}," for block in c.table()["forward"]]
    lines.append("}")
    lines += [
        f"# expert_combine alone: {block}: {entry('combine', block)}"
        for column, block in best
        if column == "combine"
    ]
    lines += [
        f"# {column} {block}: {loss:.3f} of the best time, over {n} cases"
        for (column, block), (_, loss, n) in best.items()
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------------------


def sweep(cases: list[Case], seconds: float, out: Path) -> list[Record]:
    """Compile all, time case by case, write after each."""
    deadline = time.monotonic() + seconds
    copy = copy_bandwidth(torch.device(DEVICE))
    print(f"{torch.cuda.get_device_name()}: copy {copy:.4g} GB/s", flush=True)
    records: list[Record] = []
    workers = max(1, min(14, (os.cpu_count() or 2) - 1))
    pool = worker_pool(workers)
    try:
        tasks = start_compiling(pool, cases)
        for i, case in enumerate(cases):
            if time.monotonic() > deadline:
                print(f"{seconds:.0f} s are over; not timed: {', '.join(map(str, cases[i:]))}")
                break
            try:
                usable, skipped = compiled(case, tasks[case], deadline)
                results = time_case(case, usable, skipped)
            except Exception as error:
                print(f"{case}: {type(error).__name__}: {error}", flush=True)
                continue
            record = {"case": list(case), "copy_gb_per_s": copy, "skipped": skipped}
            records.append(record | {"results": results})
            print(summary(records[-1]), flush=True)
            out.write_text(json.dumps(records))
            torch.cuda.empty_cache()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return records


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.kernels.tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--op", nargs="+", choices=c.OPS, default=DEFAULT_OPS)
    parser.add_argument(
        "--direction", nargs="+", choices=("backward", "forward"), default=["backward", "forward"]
    )
    parser.add_argument("--d", type=int, nargs="+", default=[768, 1024, 2048, 4096, 8192])
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--dtype", nargs="+", choices=c.DTYPES, default=["bf16"])
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--out", type=Path, default=Path("tune.json"))
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.kernels.tune: no CUDA device; nothing was timed")
        return 3
    cases = [
        Case(op, direction, options.rows, d, dtype)
        for direction in options.direction
        for dtype in options.dtype
        for d in options.d
        for op in options.op
    ]
    records = sweep(cases, options.seconds, options.out)
    if records:
        print(paste(records))
    print(f"written: {options.out}")
    return 0 if records else 1


if __name__ == "__main__":
    sys.exit(main())
