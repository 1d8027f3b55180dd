"""Compare runs: `deeploop compare RUN...`.

Figures of a run that has not ended yet are those of its newest lines of metrics.jsonl.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from deeploop.analyze.plan.planner import count_parameters
from deeploop.config import Config
from deeploop.config.fields import entries
from deeploop.runs.folder import read_config
from deeploop.runs.metrics_file import MetricsFile
from deeploop.utils.console import printable
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError

# Fields that say where a run is and how often it reports, not what it computes.
ASIDE = {
    "preset", "train.out", "train.log_every", "train.eval_every", "train.eval_loops",
    "train.save_every", "train.keep",
}  # fmt: skip


class Run(NamedTuple):
    """A run: its name, its configuration, and the lines of its metrics."""

    name: str
    config: Config
    metrics: list[dict[str, Any]]

    def last(self, key: str) -> Any:
        """Return the newest figure of this name; None where there is none."""
        return next((m[key] for m in reversed(self.metrics) if m.get(key) is not None), None)


def read_runs(paths: Sequence[str]) -> list[Run]:
    """Read the folders of runs; raises InputError for one that is not a run's."""
    if not paths:
        raise InputError("RUN: give the folders of one or more runs")
    folders = [user_path(path, "run") for path in paths]
    names = [folder.absolute().name for folder in folders]
    return [
        read_run(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def read_run(folder: Path, name: str) -> Run:
    """Read one run's configuration and metrics."""
    config = read_config(folder / "config.json", f"run {folder}: config.json")
    return Run(name, config, MetricsFile(folder, 0, write=False).read())


def differing(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the fields in which the runs differ, each with its value by run."""
    columns = [{e.name: e.value for e in entries(run.config)} for run in runs]
    return {
        name: [column[name] for column in columns]
        for name in columns[0]
        if name not in ASIDE and any(column[name] != columns[0][name] for column in columns)
    }


def table(runs: Sequence[Run]) -> Table:
    """Make a table with a column for each run and a row for each figure and differing field."""
    rows = Table(box=None, pad_edge=False)
    rows.add_column("", no_wrap=True)
    for run in runs:
        rows.add_column(Text(printable(run.name)), justify="right", no_wrap=True)
    figures = (
        ("steps", lambda r: number(r.last("step"), ",.0f")),
        ("held-out loss, nats/token", lambda r: number(r.last("val_loss"), ".4f")),
        ("held-out bits/byte", lambda r: number(r.last("val_bits_per_byte"), ".4f")),
        ("held-out accuracy", lambda r: number(r.last("val_accuracy"), ".4f")),
        ("tokens/s", lambda r: number(median(r, "tokens_per_second"), ",.0f")),
        ("parameters", lambda r: number(count_parameters(r.config.model), ",.0f")),
        ("peak memory, GiB", lambda r: number(r.last("memory_gib"), ".2f")),
    )
    for name, figure in figures:
        rows.add_row(name, *(figure(run) for run in runs))
    for name, values in differing(runs).items():
        rows.add_row(name, *(Text(printable(str(value))) for value in values))
    return rows


def median(run: Run, key: str) -> float | None:
    """Return the median of a figure over the lines that have it; None where none has."""
    values = sorted(m[key] for m in run.metrics if m.get(key) is not None)
    return values[len(values) // 2] if values else None


def number(value: float | None, form: str) -> str:
    """Format a number; - for none."""
    return "-" if value is None else format(value, form)


def draw(runs: Sequence[Run], out: str) -> Path:
    """Draw the losses of the runs by step, held-out losses dashed; returns the file's path."""
    from matplotlib import colormaps  # slow to import
    from matplotlib.figure import Figure

    from deeploop.runs.plots import held_out_curve, training_curve
    from deeploop.utils.figures import integer_ticks, save_figure

    path = user_path(out, "out")
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, run in enumerate(runs):
        colour = f"C{i}" if len(runs) <= 10 else colormaps["viridis"](i / (len(runs) - 1))
        training_curve(axes, run.metrics, printable(run.name).replace("$", r"\$"), colour)
        held_out_curve(axes, run.metrics, "", colour, line="--")
    axes.set_title("training loss; dashed: held-out loss")
    axes.set_xlabel("step")
    integer_ticks(axes.xaxis)
    axes.set_ylabel("cross-entropy, nats per token")
    if len(runs) <= 20:
        axes.legend(fontsize="small")
    save_figure(figure, path)
    return path
