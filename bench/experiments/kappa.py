"""kappa_R of small trained models, and how it grows with the loops.

    python -m bench.experiments.kappa --out bench/results/kappa.json

trains a small model of each residual at R = 2, 4, 8, 16 loops, for each seed, diagnoses it as it
begins, half way and at the end (see `deeploop.analyze.diagnose.per_loop` for what is measured), and prints
Markdown: kappa_R, mean over the seeds (lowest - highest), and gamma, the slope of
log kappa_R on log R, for which DeepLoop's rule wants p = (1 + gamma)/4; the same of the
visits' directions alone; the bound's constants C_U and C_G; what the models reached. Runs that
are whole already (in --folder) are not repeated.
"""

import dataclasses
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from deeploop.analyze.diagnose.diagnose import checkpoints, diagnose
from deeploop.config import Config
from deeploop.config.presets import preset
from deeploop.config.scaling import threshold_exponent
from deeploop.train.setup import open_run
from deeploop.utils.errors import Diverged


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
    """Where the runs go."""
    out: Path | None = None
    """JSON of what the table is made of."""


def small(residual: str, loops: int, seed: int, steps: int, folder: Path) -> Config:
    """Two blocks 64 wide on 16 x 64 bytes of the default corpus."""
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


def reading(config: Config) -> dict[str, Any]:
    """Train and diagnose, unless that was done; or why there is nothing to diagnose."""
    folder, quiet = Path(config.train.out), Console(quiet=True)
    summary, said = folder / "summary.json", folder / "diagnose.json"
    if not whole(summary):
        shutil.rmtree(folder, ignore_errors=True)
        try:
            open_run(config, quiet).fit()
        except Diverged as error:
            return {"diverged": str(error)}
        if not whole(summary):  # a signal ended the run, and is to end this, too
            raise KeyboardInterrupt
    if not said.exists():
        saved = checkpoints(str(folder))
        diagnose(saved[-1].config, saved, quiet, batch_size=64)
    found = json.loads(said.read_text())
    return {key: found[key] for key in ("n_layers", "sequences", "seq_len", "probes", "torch")} | {
        "val_bits_per_byte": json.loads(summary.read_text())["val_bits_per_byte"],
        "readings": [brief(r) for r in found["readings"]],
    }


def whole(summary: Path) -> bool:
    """Whether a run came to its end: it has a summary, and no signal stopped it."""
    return summary.exists() and "stopped_by" not in json.loads(summary.read_text())


def brief(reading: dict[str, Any]) -> dict[str, Any]:
    """A reading without its matrices and gains."""
    kept = {key: x for key, x in reading.items() if not isinstance(x, list)}
    kept["branches"] = [
        {key: x for key, x in branch.items() if not key.endswith("cosines")}
        for branch in reading["branches"]
    ]
    return kept


def slope(loops: list[int], kappas: list[float]) -> float:
    """Least squares of log kappa on log R."""
    x, y = [math.log(r) for r in loops], [math.log(k) for k in kappas]
    return statistics.linear_regression(x, y).slope


def table(results: list[dict[str, Any]], key: str, fit: bool = True) -> str:
    """Markdown: residuals and states down, loops across; with `fit`, gamma and p."""
    loops = sorted({r["loops"] for r in results})
    head = [f"R = {r}" for r in loops] + (["gamma", "p"] if fit else [])
    lines = [f"| residual | step | {' | '.join(head)} |", "|---|---|" + "---|" * len(head)]
    for residual in dict.fromkeys(r["residual"] for r in results):
        runs = [r for r in results if r["residual"] == residual and "readings" in r]
        for at in sorted({x["step"] for r in runs for x in r["readings"]}):
            values = {
                (r["loops"], r["seed"]): x[key]
                for r in runs
                for x in r["readings"]
                if x["step"] == at
            }
            cells = [spread([k for (r, _), k in values.items() if r == R]) for R in loops]
            cells += fitted(values, loops) if fit else []
            lines.append(f"| {residual} | {at} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fitted(values: dict[tuple[int, int], float], loops: list[int]) -> list[str]:
    """Cells of gamma and p, from the seeds that have every R; values by (R, seed).

    Empty for one R, which has no slope.
    """
    if len(loops) < 2:
        return ["", ""]
    complete = [s for s in sorted({s for _, s in values}) if all((R, s) in values for R in loops)]
    gammas = [slope(loops, [values[R, s] for R in loops]) for s in complete]
    return [spread(gammas), spread([threshold_exponent(g) for g in gammas])]


def spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.mean(values):.3g} ({min(values):.3g} - {max(values):.3g})"


def main() -> None:
    a = tyro.cli(Arguments, description=__doc__)
    results = []
    for residual in a.residuals:
        for loops in a.loops:
            for seed in range(a.seeds):
                name = f"{residual}-r{loops}-{a.steps}-{seed}"
                config = small(residual, loops, seed, a.steps, a.folder / name)
                results.append(
                    {"residual": residual, "loops": loops, "seed": seed} | reading(config)
                )
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(results) + "\n")
    for key in ("kappa", "kappa_directional", "c_u", "c_g"):
        print(f"{key}\n\n{table(results, key, fit=key.startswith('kappa'))}\n")
    ends = [r | {"readings": [{"step": a.steps} | r]} for r in results if "readings" in r]
    print(f"held-out bits/byte\n\n{table(ends, 'val_bits_per_byte', fit=False)}")


if __name__ == "__main__":
    main()
