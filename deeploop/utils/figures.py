"""Draw and save the elements that the plots of runs, profiles and diagnoses share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from deeploop.utils.disk import atomic_file

MOST_NAMES = 8  # lines that a legend names; more have a colour bar


class Line(NamedTuple):
    """One of a family of lines, by its number: a loop, or a step of training."""

    number: int
    x: Sequence[float]
    y: Sequence[float]


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


def shaded_lines(axes: Any, lines: Sequence[Line], title: str) -> None:
    """Draw lines in shades from the first to the last, with their names.

    Args:
        axes: the panel.
        lines: in their order; each is named by a number.
        title: says the kind of the numbers, such as "loop".
    """
    numbers = [line.number for line in lines]
    scale = Normalize(min(numbers), max(max(numbers), min(numbers) + 1))
    for line in lines:
        shade = colormaps["viridis"](scale(line.number))
        axes.plot(line.x, line.y, color=shade, label=str(line.number))
    if len(lines) <= MOST_NAMES:
        axes.legend(title=title, fontsize="small")
        return
    bar = axes.figure.colorbar(ScalarMappable(scale, "viridis"), ax=axes, label=title)
    integer_ticks(bar.ax.yaxis)


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
