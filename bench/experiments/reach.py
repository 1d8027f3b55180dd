"""Accuracy on longer paths by number of loops at test time, with and without injection.

    python -m bench.experiments.reach --out runs/reach.json

trains, for each seed, `reach-tiny` with and without the tokens mixed in again in each loop, its
loops drawn and fixed, all on paths of 1 to 4 hops. It prints as Markdown the share of held-out
sequences of 12-hop paths whose 24 answers are all right after 1 to 32 loops: mean, lowest and
highest over the seeds. Runs that the file already has are not trained again.

The sentence that it tries is that of arXiv 2202.05826 and 2409.15647: a looped model that sees its
input in every loop, and does not know how many loops come, solves harder instances with more loops.
"""

import dataclasses
from pathlib import Path

import tyro

from bench.experiments import depth

LOOPS = (1, 2, 4, 6, 8, 12, 16, 24, 32)


@dataclasses.dataclass
class Arguments(depth.Arguments):
    steps: int = 1000
    """Steps of each run."""
    out: Path = Path("runs/reach.json")
    """JSON of every run's end; runs that it already has are not repeated."""


def cases(steps: int) -> dict[str, str]:
    """Return the case of `bench.experiments.runs` that each row of the table trains."""
    common = f"reach-tiny --steps {steps} --train.eval-loops {','.join(map(str, LOOPS))}"
    return {
        "tokens added in each loop; drawn loops": common,
        "tokens added in each loop; 4 loops": f"{common} --loop-count fixed",
        "no injection; drawn loops": f"{common} --model.inject none",
        "no injection; 4 loops": f"{common} --model.inject none --loop-count fixed",
    }


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    depth.compare(arguments, cases(arguments.steps), LOOPS, "val_loop_accuracies")


if __name__ == "__main__":
    main()
