"""LOOM, and LOOM without each of its parts, trained side by side on the default corpus.

    python -m bench.loom_arms --out bench/results/loom-arms.json

trains `loom-tiny`, the same with one loop alone, the loop without any of LOOM's parts, and
LOOM without each of them (--partial: other arms, too), for each seed, and prints held-out
bits per byte as a Markdown table: mean, lowest and highest over the seeds. Runs that are
whole already (in --folder) are not trained again; --jobs runs go on at a time, each on its
share of the cores. What did not stay finite is counted.
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tyro

from deeploop.errors import InputError
from deeploop.presets import LOOM_ARMS, preset


@dataclasses.dataclass
class Arguments:
    base: str = "loom-tiny"
    """Preset whose arms are compared."""
    seeds: int = 3
    """Seeds 0, 1, ... of each arm."""
    partial: bool = False
    """Also the released code's reading, and loops with one part alone."""
    steps: int = 0
    """Steps of each run; 0: the preset's."""
    jobs: int = 2
    """Runs at a time."""
    folder: Path = Path("runs/loom-arms")
    """Where the runs go."""
    out: Path | None = None
    """JSON of every run's end."""


def arms(base: str, partial: bool) -> dict[str, list[str]]:
    """What each row trains: a preset, and overrides."""
    rows = {"one loop": [base, "--model.loops", "1"], "LOOM": [base]}
    for arm in ("released", *LOOM_ARMS):
        if partial or not (arm == "released" or arm.endswith("-only")):
            rows[arm] = [f"{base}-{arm}"]
    return rows


def train(arguments: Arguments, flags: list[str], folder: Path, seed: int) -> dict[str, Any]:
    """One run in a process of its own; its summary, or why there is none."""
    summary = folder / "summary.json"
    if not whole(summary):
        shutil.rmtree(folder, ignore_errors=True)
        threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
        command = [sys.executable, "-m", "deeploop.cli", "train", *flags, "--seed", str(seed)]
        command += ["--out", str(folder), "--train.eval-every", "0", "--train.save-every", "0"]
        if arguments.steps:
            command += ["--steps", str(arguments.steps)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        if done.returncode == 1:
            return {"diverged": done.stderr.strip().splitlines()[-1]}
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    logged = [m for m in map(json.loads, lines) if "residual_rms" in m]
    found: dict[str, Any] = json.loads(summary.read_text())
    keep = ("val_loss", "val_bits_per_byte", "parameters", "tokens_per_second", "device", "torch")
    return (
        {k: found[k] for k in keep}
        | {"residual_rms": logged[-1]["residual_rms"]}
        | {k: logged[-1][k] for k in ("router_overlap", "load_spread")}
    )


def whole(summary: Path) -> bool:
    """Whether a run went to its end."""
    return summary.exists() and "val_loss" in json.loads(summary.read_text())


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Markdown: a row for each arm."""
    lines = [
        "| arm | held-out bits/byte: mean (lowest - highest) | RMS of the stream, last loop "
        "| cosine of loads between loops | diverged |",
        "|---|---|---|---|---|",
    ]
    for arm, runs in results.items():
        whole = [r for r in runs if "diverged" not in r]
        cells = ["", "", ""]
        if whole:
            bits = [r["val_bits_per_byte"] for r in whole]
            cells[0] = f"{statistics.mean(bits):.3f} ({min(bits):.3f} - {max(bits):.3f})"
            cells[1] = f"{statistics.mean(r['residual_rms'][-1] for r in whole):.2f}"
            cells[2] = _apart([r["router_overlap"] for r in whole])
        lines.append(f"| {arm} | {' | '.join(cells)} | {len(runs) - len(whole)} of {len(runs)} |")
    return "\n".join(lines)


def _apart(overlaps: list[list[list[float]]]) -> str:
    """Mean over pairs of different loops, and runs."""
    pairs = [x for m in overlaps for i, row in enumerate(m) for x in row[:i]]
    return f"{statistics.mean(pairs):.2f}" if pairs else ""


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    try:
        steps = arguments.steps or preset(arguments.base).train.steps
    except InputError as error:
        sys.exit(f"loom_arms: {error}")
    folder = arguments.folder / f"{arguments.base}-{steps}"
    rows = arms(arguments.base, arguments.partial)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        jobs = {
            (arm, seed): pool.submit(
                train, arguments, flags, folder / f"{arm.replace(' ', '-')}-{seed}", seed
            )
            for seed in range(arguments.seeds)
            for arm, flags in rows.items()
        }
        results = {
            arm: [jobs[arm, seed].result() for seed in range(arguments.seeds)] for arm in rows
        }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
