"""LOOM and its ablations, trained side by side on the default corpus.

    python -m bench.experiments.ablation --out runs/ablation.json

trains, for each seed, `loom-tiny`, the same with one loop, the loop without any component of
LOOM, and LOOM without each component (--partial: more variants), and prints held-out bits per
byte as Markdown: mean, lowest and highest over the seeds. Runs that the file already has are not
trained again. Runs that diverged are counted.
"""

import dataclasses
import statistics
import sys
from pathlib import Path

import tyro

from bench.experiments.runs import Results, by_seed, sweep, with_seeds
from bench.harness.markdown import markdown_table, mean_and_range
from deeploop.config.presets import LOOM_ABLATIONS, preset
from deeploop.utils.errors import InputError


@dataclasses.dataclass
class Arguments:
    base: str = "loom-tiny"
    """Preset whose ablations are compared."""
    seeds: int = 3
    """Seeds 0, 1, ... of each ablation."""
    partial: bool = False
    """Also the released code's reading, and loops with a single component."""
    steps: int = 0
    """Steps of each run; 0: the preset's."""
    jobs: int = 2
    """Runs at a time."""
    out: Path = Path("runs/ablation.json")
    """JSON of every run's end; runs that it already has are not repeated."""


def ablations(base: str = "loom-tiny", steps: int = 0, partial: bool = False) -> dict[str, str]:
    """Return the case of `bench.experiments.runs` that each row of the table trains.

    Raises InputError on an unknown preset.
    """
    flags = f"--steps {steps or preset(base).train.steps} --train.precision fp32"
    rows = {"one loop": f"{base} --model.loops 1 {flags}", "LOOM": f"{base} {flags}"}
    for name in ("released", *LOOM_ABLATIONS):
        if partial or not (name == "released" or name.endswith("-only")):
            rows[name] = f"{base}-{name} {flags}"
    return rows


def ablation_table(cases: dict[str, str], results: Results) -> str:
    """Format a row for each ablation as Markdown."""
    head = [
        "ablation",
        "held-out bits/byte: mean (lowest to highest)",
        "RMS of the stream, last loop",
    ]
    head += ["cosine of expert loads between loops", "diverged"]
    rows = []
    for name, case in cases.items():
        runs = list(by_seed(results, case).values())
        finite = [r for r in runs if "diverged" not in r]
        cells = ["", "", ""]
        if finite:
            cells[0] = mean_and_range([r["val_bits_per_byte"] for r in finite])
            cells[1] = f"{statistics.mean(r['residual_rms'][-1] for r in finite):.2f}"
            cells[2] = between_loops([r["router_overlap"] for r in finite])
        rows.append([name, *cells, f"{len(runs) - len(finite)} of {len(runs)}"])
    return markdown_table(head, rows, text_columns=5)


def between_loops(overlaps: list[list[list[float]]]) -> str:
    """Format the mean of the runs' overlap matrices over pairs of different loops."""
    pairs = [x for m in overlaps for i, row in enumerate(m) for x in row[:i]]
    return f"{statistics.mean(pairs):.2f}" if pairs else ""


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    try:
        cases = ablations(a.base, a.steps, a.partial)
        results = sweep(with_seeds(cases.values(), a.seeds), a.out, a.jobs)
    except InputError as error:
        sys.exit(f"ablation: {error}")
    print(ablation_table(cases, results))


if __name__ == "__main__":
    main()
