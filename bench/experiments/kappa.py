"""kappa_R of small trained models, and its growth with the loops.

    python -m bench.experiments.kappa --out runs/kappa.json
    python -m bench.experiments.kappa --table bench/results/kappa-cpu-2026-11-30.json

The first trains a small model with each residual rule at R = 2, 4, 8, 16 loops, for each seed,
and diagnoses it at its start, half way and at its end (`deeploop.analyze.diagnose.per_loop` has
the definitions); runs that are complete in --folder are not repeated. The second only prints.

Printed as Markdown, mean over the seeds (lowest to highest): kappa_R, and gamma, the slope of
log kappa_R on log R, for which DeepLoop's rule asks for p = (1 + gamma)/4; the same of the
visits' directions alone; the bound's constants C_U and C_G; held-out bits per byte.
"""

import dataclasses
import json
import math
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from bench.harness.markdown import markdown_table, mean_and_range
from bench.harness.stored import read_json
from deeploop.analyze.diagnose.diagnose import checkpoints, diagnose
from deeploop.config import Config
from deeploop.config.presets import preset
from deeploop.config.scaling import threshold_exponent
from deeploop.train.setup import open_run
from deeploop.utils.errors import Diverged, InputError

Result = dict[str, Any]


@dataclasses.dataclass
class Arguments:
    residuals: tuple[str, ...] = ("deeploop", "deepnorm", "pre_norm")
    """Residual rules."""
    loops: tuple[int, ...] = (2, 4, 8, 16)
    """R."""
    seeds: int = 2
    """Seeds 0, 1, ... of each."""
    steps: int = 150
    """Steps of each run."""
    folder: Path = Path("runs/kappa")
    """Folder of the runs."""
    out: Path | None = None
    """JSON of the results."""
    table: Path | None = None
    """Train nothing: print the results in this file."""


def small(residual: str, loops: int, seed: int, steps: int, folder: Path) -> Config:
    """Configure two blocks 64 wide on 16 x 64 bytes of the default corpus."""
    config = preset("deeploop-tiny").replace(
        "model", residual=residual, loops=loops, d_model=64, n_heads=2, seq_len=64
    )
    return config.replace(
        "train",
        steps=steps,
        seed=seed,
        precision="fp32",
        device="cpu",
        save_every=steps // 2,
        keep=0,
        eval_every=0,
        eval_tokens=2**16,
        out=str(folder),
    )


def measure(config: Config) -> Result:
    """Train and diagnose a run, unless that is done already.

    Returns its readings, or the reason why it diverged.
    """
    folder, quiet = Path(config.train.out), Console(quiet=True)
    summary, diagnosis = folder / "summary.json", folder / "diagnose.json"
    if not complete(summary):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            open_run(config, quiet).fit()
        except Diverged as error:
            return {"diverged": str(error)}
        if not complete(summary):  # a signal stopped the run, and is meant for this process, too
            raise KeyboardInterrupt
    if not diagnosis.exists():
        saved = checkpoints(str(folder))
        diagnose(saved[-1].config, saved, quiet, sequences=64)
    content = json.loads(diagnosis.read_text())
    fields = ("n_layers", "sequences", "seq_len", "probes", "torch")
    return {key: content[key] for key in fields} | {
        "val_bits_per_byte": json.loads(summary.read_text())["val_bits_per_byte"],
        "readings": [without_matrices(r) for r in content["readings"]],
    }


def complete(summary: Path) -> bool:
    """Whether a run ended by itself: it has a summary, and no signal stopped it."""
    return summary.exists() and "stopped_by" not in json.loads(summary.read_text())


def without_matrices(reading: Result) -> Result:
    """Drop a reading's matrices and gains."""
    short = {key: x for key, x in reading.items() if not isinstance(x, list)}
    short["branches"] = [
        {key: x for key, x in branch.items() if not key.endswith("cosines")}
        for branch in reading["branches"]
    ]
    return short


def slope(loops: list[int], kappas: list[float]) -> float:
    """Fit log kappa = gamma log R + c by least squares; returns gamma."""
    x, y = [math.log(r) for r in loops], [math.log(k) for k in kappas]
    return statistics.linear_regression(x, y).slope


def kappa_table(results: list[Result], key: str, fit: bool = True) -> str:
    """Format a figure as Markdown: a row for each residual rule and step, a column for each R.

    With `fit`, gamma and p follow.
    """
    loops = sorted({r["loops"] for r in results})
    head = ["residual", "step", *(f"R = {r}" for r in loops), *(["gamma", "p"] if fit else [])]
    rows = []
    for residual in dict.fromkeys(r["residual"] for r in results):
        runs = [r for r in results if r["residual"] == residual and "readings" in r]
        for step in sorted({x["step"] for r in runs for x in r["readings"]}):
            values = {
                (r["loops"], r["seed"]): x[key]
                for r in runs
                for x in r["readings"]
                if x["step"] == step
            }
            cells = [[k for (r, _), k in values.items() if r == R] for R in loops]
            cells += exponents(values, loops) if fit else []
            rows.append([residual, str(step), *(mean_and_range(c, ".3g") for c in cells)])
    return markdown_table(head, rows, text_columns=len(head))


def exponents(values: dict[tuple[int, int], float], loops: list[int]) -> list[list[float]]:
    """Fit gamma and p for each seed that has every R; values are by (R, seed).

    Both lists are empty with one R, which has no slope.
    """
    seeds = sorted({seed for _, seed in values}) if len(loops) > 1 else []
    complete_seeds = [s for s in seeds if all((R, s) in values for R in loops)]
    gammas = [slope(loops, [values[R, s] for R in loops]) for s in complete_seeds]
    return [gammas, [threshold_exponent(gamma) for gamma in gammas]]


def markdown(results: list[Result]) -> str:
    """Format all tables."""
    tables = [
        f"{key}\n\n{kappa_table(results, key, fit=key.startswith('kappa'))}"
        for key in ("kappa", "kappa_directional", "c_u", "c_g")
    ]
    ends = [
        r | {"readings": [{"step": r["readings"][-1]["step"]} | r]}
        for r in results
        if "readings" in r
    ]
    tables.append(f"held-out bits/byte\n\n{kappa_table(ends, 'val_bits_per_byte', fit=False)}")
    return "\n\n".join(tables)


def train_all(a: Arguments) -> list[Result]:
    """Train and diagnose a model for each residual rule, R and seed."""
    results = []
    for residual in a.residuals:
        for loops in a.loops:
            for seed in range(a.seeds):
                name = f"{residual}-r{loops}-{a.steps}-{seed}"
                config = small(residual, loops, seed, a.steps, a.folder / name)
                case = {"residual": residual, "loops": loops, "seed": seed}
                results.append(case | measure(config))
    return results


def main(arguments: list[str] | None = None) -> None:
    a = tyro.cli(Arguments, description=__doc__, args=arguments)
    try:
        results = read_json(a.table) if a.table else train_all(a)
    except InputError as error:
        sys.exit(f"kappa: {error}")
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(results) + "\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
