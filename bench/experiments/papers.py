"""Claims of the papers that a CPU can test: several seeds each, beside the paper's result.

    python -m bench.experiments.papers --out runs/papers.json --png runs/papers.png
    python -m bench.experiments.papers --table bench/results/papers-cpu-2026-11-30.json \
        bench/results/loom-arms-cpu-2026-11-30.json

The first trains the runs that its file lacks and prints Markdown, the second only prints.

p-sweep   DeepLoop (arXiv 2607.13491, appendix C): which exponents p escape the unigram floor
by-loops  its table 1: DeepLoop against the pre-norm loop by R
segments  LOOM (arXiv 2610.01153, figure 5): segmented against full backprop
loom      its table 5: LOOM without each component (`bench.experiments.ablation`)

A run has escaped if its held-out loss ends MARGIN bits per byte below that of letter counts on
the same text. A claim agrees if every seed has the paper's sign, is denied if every seed has the
other sign, and is open in between.
"""

import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import tyro
from matplotlib.figure import Figure

from bench.experiments import ablation
from bench.experiments.runs import Result, Results, by_seed, load, sweep, with_seeds
from bench.harness.markdown import markdown_table, mean_and_range
from deeploop.utils.disk import atomic_file
from deeploop.utils.errors import InputError

Claim = Literal["p-sweep", "by-loops", "segments", "loom"]
MARGIN = 0.1
TINY = (
    "deeploop-tiny --model.d-model 64 --model.n-heads 2 --model.seq-len 64 "
    "--train.batch-size 8 --steps 200 --train.precision fp32"
)
P = (0.25, 0.5, 0.6)
SWEPT = {  # R, and learning rates on both sides of where its runs leave the floor
    4: (2e-3, 2.5e-3, 3e-3), 8: (2e-3, 2.5e-3, 3e-3), 16: (1e-3, 1.5e-3, 2e-3),
}  # fmt: skip
LOOPS, LOOPS_LRS = (1, 2, 4, 8), (1e-3, 2e-3, 4e-3, 8e-3)
ALL_LRS = sorted({*itertools.chain(*SWEPT.values()), *LOOPS_LRS})
NAMES: dict[float | None, str] = {p: f"p = {p:g}" for p in P} | {None: "pre_norm"}
SEGMENTS = ablation.ablations()["LOOM"]
BACKPROP = {
    "segments of 3 loops, a step for each": SEGMENTS,
    "segments of 3 loops, a step for each batch": f"{SEGMENTS} --train.step-per batch",
    "full": f"{SEGMENTS} --train.backprop full",
    "full, twice as many batches, half as large": (
        SEGMENTS.replace("--steps 100", "--steps 200")
        + " --train.backprop full --train.batch-size 8"
    ),
}
COMPONENTS = {  # LOOM's, and the perplexity without each in its table 5; with all 18.62
    "no-scaling": 24.63, "no-injection": 26.05, "no-branch-norm": 26.50,
    "no-looping-residual": 19.25, "shared-router": 19.83,
}  # fmt: skip


@dataclasses.dataclass
class Arguments:
    claims: tuple[Claim, ...] = ("p-sweep", "by-loops", "segments", "loom")
    """Claims whose runs are trained."""
    seeds: int = 3
    """Seeds 0, 1, ... of each case."""
    jobs: int = 2
    """Runs at a time."""
    out: Path = Path("runs/papers.json")
    """JSON of every run's end; runs that it already has are not repeated."""
    table: tuple[Path, ...] = ()
    """Train nothing: print the results in these files."""
    png: Path | None = None
    """Draw the p-sweep into this file."""


def looped(p: float | None, loops: int, lr: float) -> str:
    """Return a case of DeepLoop at an exponent p, or of the pre-norm loop for None."""
    rule = (
        "--model.residual pre_norm" if p is None else f"--model.residual deeploop --model.p {p:g}"
    )
    return f"{TINY} {rule} --model.loops {loops} --lr {lr:g}"


def cases(claim: Claim) -> list[str]:
    """List the cases that a claim trains."""
    if claim == "p-sweep":
        return [looped(p, r, lr) for r, lrs in SWEPT.items() for lr in lrs for p in P]
    if claim == "by-loops":
        return [looped(p, r, lr) for r in LOOPS for lr in LOOPS_LRS for p in (0.5, None)]
    return list((BACKPROP if claim == "segments" else ablation.ablations()).values())


class Row(NamedTuple):
    """A claim, the paper's result, the result here, and whether they agree."""

    claim: str
    paper: str
    here: str
    agrees: str


def escaped(result: Result) -> bool:
    """Whether a run ended below the loss of letter counts."""
    floor: float = result["unigram_bits_per_byte"] - MARGIN
    return "diverged" not in result and result["val_bits_per_byte"] < floor


def differences(results: Results, case: str, base: str) -> list[float]:
    """Subtract a base's bits per byte from a case's, seed by seed, where both are finite."""
    ours, theirs = (
        {s: r["val_bits_per_byte"] for s, r in by_seed(results, c).items() if "diverged" not in r}
        for c in (case, base)
    )
    return [ours[s] - theirs[s] for s in sorted(ours.keys() & theirs.keys())]


def verdict(values: Sequence[float], sign: int | None) -> str:
    """Compare the signs of the differences with the paper's.

    sign: 1 or -1; 0 where the paper has no effect, which agrees with differences of both
    signs; None where the paper has no result.
    """
    signs = {math.copysign(1, v) for v in values}
    if not signs or sign is None:
        return ""
    if sign == 0 or len(signs) == 2:
        return "open" if sign else "yes" if len(signs) == 2 else "**no**"
    return "yes" if signs == {sign} else "**no**"


def compare(claim: str, paper: str, values: Sequence[float], sign: int | None) -> Row:
    """Make a row of differences in bits per byte; one seed is no evidence."""
    agrees = verdict(values, sign) if len(values) > 1 else ""
    return Row(claim, paper, mean_and_range(values, "+.3f"), agrees)


def escapes(results: Results) -> list[Row]:
    """Test whether more runs escape as p grows."""
    rows = []
    for loops, lrs in SWEPT.items():
        counts = {}
        for p in P:
            runs = [by_seed(results, looped(p, loops, lr)).values() for lr in lrs]
            counts[p] = [escaped(r) for group in runs for r in group]
        shares = [statistics.mean(c) for c in counts.values() if c]
        steps = [after - before for before, after in itertools.pairwise(shares)]
        here = ", ".join(f"{p:g}: {sum(c)}/{len(c)}" for p, c in counts.items())
        claim = f"R = {loops}: runs that escape, by p, over all learning rates"
        paper = "grow with p: .30: 0/5, .50: 3/5, .55: 5/5"
        rows.append(Row(claim, paper, here, verdict([s for s in steps if s], +1)))
    return rows


def costs(results: Results) -> list[Row]:
    """Test whether a larger p costs loss where every p escapes."""
    rows = []
    for loops, lrs in SWEPT.items():
        costs_by_seed = []
        for lr in lrs:
            runs = [by_seed(results, looped(p, loops, lr)) for p in P]
            for seed in set.intersection(*(set(r) for r in runs)):
                ends = [r[seed] for r in runs]
                if all(map(escaped, ends)):
                    costs_by_seed.append(
                        ends[-1]["val_bits_per_byte"] - ends[0]["val_bits_per_byte"]
                    )
        difference, runs_of_each = f"p = {P[-1]:g} less p = {P[0]:g}", len(costs_by_seed)
        claim = f"R = {loops}: {difference} where all p escape ({runs_of_each})"
        rows.append(compare(claim, "more: +.10 nats/token from .45 to .60", costs_by_seed, +1))
    return rows


def best(results: Results, p: float | None, loops: int) -> str:
    """Choose the case whose learning rate has the lowest mean, of those with the most seeds.

    A rate at which a run diverges is the worst.
    """
    ends = {
        case: [r.get("val_bits_per_byte", math.inf) for r in by_seed(results, case).values()]
        for case in (looped(p, loops, lr) for lr in LOOPS_LRS)
    }
    return min(ends, key=lambda case: (-len(ends[case]), sum(ends[case])))


def by_loops(results: Results) -> list[Row]:
    """Compare DeepLoop with the pre-norm loop, each at the best of its learning rates."""
    rows = []
    for loops in LOOPS:
        ours, theirs = best(results, 0.5, loops), best(results, None, loops)
        rates = " and ".join(case.rpartition(" ")[2] for case in (ours, theirs))
        claim = f"R = {loops}: DeepLoop less pre_norm, each at its best lr ({rates})"
        paper = "-.015 to -.028 nats/token at R = 3, 5, 7" if loops > 1 else "none: +.0004, +.0011"
        sign = -1 if loops > 1 else 0
        rows.append(compare(claim, paper, differences(results, ours, theirs), sign))
    return rows


def segments_against_full(results: Results) -> list[Row]:
    """Compare segmented with full backprop at equal batches, and at equal updates.

    Not at H = 3, where the paper has 18.27 against 26.63: there segments of 3 are full backprop.
    """
    segments, single, full, halved = BACKPROP.values()
    return [
        compare(
            "H = 6: segments less full, equal batches",
            "less: perplexity 15.35 against 25.33",
            differences(results, segments, full),
            -1,
        ),
        compare(
            "the same with as many updates: full on half batches",
            "not tried",
            differences(results, segments, halved),
            None,
        ),
        compare(
            "the same with as many updates: segments, a step for each batch",
            "not tried",
            differences(results, single, full),
            None,
        ),
    ]


def components(results: Results) -> list[Row]:
    """Compare LOOM without each component with LOOM."""
    rows, loom = [], ablation.ablations()
    for name, perplexity in COMPONENTS.items():
        values = differences(results, loom[name], loom["LOOM"])
        paper = f"more: perplexity {perplexity:.2f} against 18.62"
        rows.append(compare(f"H = 6: LOOM {name} less LOOM", paper, values, +1))
    return rows


def markdown(results: Results) -> str:
    """Format every claim that has runs, then every mean."""
    tests = (escapes, costs, by_loops, segments_against_full, components)
    rows = [row for test in tests for row in test(results) if row.agrees or row.here]
    blocks = [
        markdown_table(("claim", "paper", "here", "agrees"), rows, 4),
        f"`deeploop train {TINY} ...`",
        "Held-out bits/byte, mean (lowest to highest) of the runs that end "
        f"{MARGIN} below the unigram floor, and how many of how many do:",
        *(learning_rates(results, loops) for loops in sorted({*SWEPT, *LOOPS})),
    ]
    ends = []
    for name, case in BACKPROP.items():
        runs = by_seed(results, case).values()
        bits = [r["val_bits_per_byte"] for r in runs if "diverged" not in r]
        ends.append([name, mean_and_range(bits)])
    blocks.append(markdown_table(["`loom-tiny`, 6 loops", "held-out bits/byte"], ends, 2))
    return "\n\n".join(blocks)


def learning_rates(results: Results, loops: int) -> str:
    """Format a row for each p and for the pre-norm loop, a column for each learning rate."""
    rows = []
    for p, name in NAMES.items():
        cells = [cell(by_seed(results, looped(p, loops, lr))) for lr in ALL_LRS]
        if any(cells):
            rows.append([name, *cells])
    head = [f"R = {loops}", *(f"lr {lr:g}" for lr in ALL_LRS)]
    return markdown_table(head, rows, len(head))


def cell(runs: dict[int, Result]) -> str:
    """Format bits per byte of the runs that escaped, how many did, and how many diverged."""
    if not runs:
        return ""
    inside = [r["val_bits_per_byte"] for r in runs.values() if escaped(r)]
    lost = sum("diverged" in r for r in runs.values())
    text = f"{mean_and_range(inside, '.2f')} {len(inside)}/{len(runs)}".strip()
    return f"{text}, {lost} diverged" if lost else text


def plot(results: Results, path: Path) -> None:
    """Draw a map for each R: mean bits per byte by p and learning rate, and how many escape."""
    figure = Figure(figsize=(4 * len(SWEPT), 3.5), layout="constrained")
    panels = figure.subplots(1, len(SWEPT), squeeze=False)[0]
    floor = max(r.get("unigram_bits_per_byte", 0.0) for r in results.values())
    for axes, (loops, lrs) in zip(panels, SWEPT.items(), strict=True):
        means = [[math.nan] * len(lrs) for _ in P]
        for (y, p), (x, lr) in itertools.product(enumerate(P), enumerate(lrs)):
            runs = by_seed(results, looped(p, loops, lr)).values()
            if runs:
                means[y][x] = statistics.mean(r.get("val_bits_per_byte", floor) for r in runs)
                text = f"{means[y][x]:.2f}\n{sum(map(escaped, runs))}/{len(runs)}"
                axes.text(x, y, text, ha="center", va="center")
        image = axes.imshow(means, cmap="Wistia", vmin=3, vmax=floor, aspect="auto")
        axes.set_xticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
        axes.set_yticks(range(len(P)), [NAMES[p] for p in P])
        axes.set_xlabel("learning rate")
        axes.set_title(f"R = {loops}")
    figure.colorbar(image, ax=panels, label="held-out bits/byte; runs that escape")
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    a = tyro.cli(Arguments, description=__doc__, args=arguments)
    try:
        if a.table:
            results = {run: end for file in a.table for run, end in load(file).items()}
        else:
            results = sweep(
                with_seeds([c for n in a.claims for c in cases(n)], a.seeds), a.out, a.jobs
            )
    except InputError as error:
        sys.exit(f"papers: {error}")
    except KeyboardInterrupt:
        sys.exit(f"papers: stopped; the same command goes on from {a.out}")
    print(markdown(results))
    if a.png is not None:
        plot(results, a.png)


if __name__ == "__main__":
    main()
