"""Held-out loss by number of loops at test time, for fixed and for drawn loops in training.

    python -m bench.experiments.depth --out runs/depth.json

trains, for each seed, `huginn-tiny` (start from noise, the input mixed in by an adapter) with its
loops fixed, drawn for each batch and drawn for each sequence, and `deeploop-tiny` (neither) with
its loops fixed and drawn, and prints held-out bits per byte after 1 to 32 loops as Markdown:
mean, lowest and highest over the seeds. Runs that the file already has are not trained again.

The sentence that it tries is Huginn's (arXiv 2502.05171): a model trained with drawn loops gets
better with more loops at test time and then stays so.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from bench.experiments.runs import Results, by_seed, sweep, with_seeds
from bench.harness.markdown import markdown_table, mean_and_range
from deeploop.utils.errors import InputError

LOOPS = (1, 2, 4, 8, 16, 32)


@dataclasses.dataclass
class Arguments:
    seeds: int = 3
    """Seeds 0, 1, ... of each case."""
    steps: int = 150
    """Steps of each run."""
    jobs: int = 2
    """Runs at a time."""
    out: Path = Path("runs/depth.json")
    """JSON of every run's end; runs that it already has are not repeated."""
    table: bool = False
    """Only print the table of the runs that the file has."""


def cases(steps: int) -> dict[str, str]:
    """Return the case of `bench.experiments.runs` that each row of the table trains."""
    common = f"--steps {steps} --train.eval-tokens 16384 --train.eval-loops "
    common += ",".join(map(str, LOOPS))
    huginn, plain = f"huginn-tiny {common}", f"deeploop-tiny {common}"
    return {
        "noise, adapter; 4 loops": f"{huginn} --loop-count fixed",
        "noise, adapter; drawn for each batch": f"{huginn} --loop-count poisson",
        "noise, adapter; drawn for each sequence": (
            f"{huginn} --loop-count poisson --train.loop-count-per sequence"
        ),
        "no injection; 4 loops": f"{plain} --loop-count fixed",
        "no injection; drawn for each batch": f"{plain} --loop-count poisson",
    }


def by_loops(rows: dict[str, str], results: Results, loops: Sequence[int], figure: str) -> str:
    """Format a row for each case, a column for each number of loops, as Markdown.

    figure: the list in a result that has a number for each of the loops.
    """
    head = ["loops in training", *(f"{n} at test" for n in loops), "seeds"]
    lines = []
    for name, case in rows.items():
        runs = [r for r in by_seed(results, case).values() if "diverged" not in r]
        columns = zip(*(r[figure] for r in runs), strict=True)
        cells = [mean_and_range(list(column)) for column in columns]
        lines.append([name, *(cells or [""] * len(loops)), str(len(runs))])
    return markdown_table(head, lines, text_columns=len(head))


def compare(arguments: Arguments, rows: dict[str, str], loops: Sequence[int], figure: str) -> None:
    """Train the runs that the file lacks and print the table of `by_loops`."""
    runs = [] if arguments.table else with_seeds(rows.values(), arguments.seeds)
    try:
        results = sweep(runs, arguments.out, arguments.jobs)
    except InputError as error:
        sys.exit(str(error))
    print(by_loops(rows, results, loops, figure))


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    compare(arguments, cases(arguments.steps), LOOPS, "val_loop_bits_per_byte")


if __name__ == "__main__":
    main()
