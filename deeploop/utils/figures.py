"""Draw and save the elements that the plots of runs, profiles and diagnoses share."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from deeploop.utils.disk import atomic_file


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG file that is complete or absent."""
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def log_scale_if_wide(axes: Any) -> None:
    """Make y logarithmic where its values differ by more than ten times, else start it at 0."""
    values = [float(y) for line in axes.get_lines() for y in line.get_ydata()]
    if min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(values) or 1)


def log_scale(axes: Any) -> None:
    """Make y logarithmic, with plain numbers at the ticks: for values not far from 1."""
    axes.set_yscale("log")
    for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        set_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.4)))


def integer_ticks(axis: Any) -> None:
    """Put the ticks of an axis (`axes.xaxis` or `axes.yaxis`) at integers only."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def loop_matrix(axes: Any, values: list[list[float]], title: str, low: float) -> None:
    """Draw a [loops, loops] matrix as a heatmap with colours from `low` to 1; None is white."""
    count = len(values)
    edges = (0.5, count + 0.5, count + 0.5, 0.5)
    image = axes.imshow(np.array(values, float), vmin=low, vmax=1, extent=edges)
    for axis in (axes.xaxis, axes.yaxis):
        integer_ticks(axis)
    axes.figure.colorbar(image, ax=axes)
    axes.set_title(title)
    axes.set_xlabel("loop")
    axes.set_ylabel("loop")
