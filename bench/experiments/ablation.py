"""LOOM, and LOOM without each of its parts, trained side by side on the default corpus.

    python -m bench.experiments.ablation --out bench/results/loom-arms.json

trains `loom-tiny`, the same with one loop alone, the loop without any of LOOM's parts, and
LOOM without each of them (--partial: other arms, too), for each seed, and prints held-out
bits per byte as a Markdown table: mean, lowest and highest over the seeds. Runs that the
file holds already are not trained again. What did not stay finite is counted.
"""

import dataclasses
import statistics
import sys
from pathlib import Path

import tyro

from bench.experiments.runs import Results, by_seed, each, spread, sweep
from deeploop.config.presets import LOOM_ABLATIONS, preset
from deeploop.utils.errors import InputError


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
    out: Path = Path("runs/loom-arms.json")
    """JSON of every run's end, gone on with where it exists."""


def arms(base: str = "loom-tiny", steps: int = 0, partial: bool = False) -> dict[str, str]:
    """What each row trains: a case of `bench.experiments.runs`. Raises InputError on an unknown preset."""
    ends = f"--steps {steps or preset(base).train.steps} --train.precision fp32"
    rows = {"one loop": f"{base} --model.loops 1 {ends}", "LOOM": f"{base} {ends}"}
    for arm in ("released", *LOOM_ABLATIONS):
        if partial or not (arm == "released" or arm.endswith("-only")):
            rows[arm] = f"{base}-{arm} {ends}"
    return rows


def table(rows: dict[str, str], results: Results) -> str:
    """Markdown: a row for each arm."""
    lines = [
        "| arm | held-out bits/byte: mean (lowest to highest) | RMS of the stream, last loop "
        "| cosine of loads between loops | diverged |",
        "|---|---|---|---|---|",
    ]
    for arm, case in rows.items():
        runs = list(by_seed(results, case).values())
        whole = [r for r in runs if "diverged" not in r]
        cells = ["", "", ""]
        if whole:
            cells[0] = spread([r["val_bits_per_byte"] for r in whole])
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
        rows = arms(arguments.base, arguments.steps, arguments.partial)
        results = sweep(each(rows.values(), arguments.seeds), arguments.out, arguments.jobs)
    except InputError as error:
        sys.exit(f"loom_arms: {error}")
    print(table(rows, results))


if __name__ == "__main__":
    main()
