"""Draw loss.png and loops.png of a run."""

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from deeploop.utils.disk import atomic_file


def save_figure(figure: Figure, path: Path) -> None:
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=120)


def loss(metrics: list[dict[str, Any]], floors: dict[str, float], path: Path) -> None:
    """Training and held-out loss by step, in nats per token; each segment's where there are."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    _segments(axes, metrics)
    count = _alike(metrics, "segment_losses")[1]
    last = f"training, segment {count} (last)" if count else "training"
    for key, label in (("loss", last), ("val_loss", "held out")):
        points = [(m["step"], m[key]) for m in metrics if key in m]
        if points:
            axes.plot(
                *zip(*points, strict=True), label=label, marker="." if key == "val_loss" else ""
            )
    for name, nats in floors.items():
        axes.axhline(nats, linestyle=":", linewidth=1, color="grey")
        axes.annotate(name, (1, nats), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats per token")
    axes.legend()
    save_figure(figure, path)


def _alike(metrics: list[dict[str, Any]], key: str) -> tuple[list[dict[str, Any]], int]:
    """The lines with as many values under key as the newest that has any, and how many."""
    count = next((len(m[key]) for m in reversed(metrics) if key in m), 0)
    return [m for m in metrics if key in m and len(m[key]) == count], count


def _segments(axes: Any, metrics: list[dict[str, Any]]) -> None:
    """Losses of the segments before the last, faintly."""
    lines, count = _alike(metrics, "segment_losses")
    for i in range(count - 1):
        points = [(m["step"], m["segment_losses"][i]) for m in lines]
        axes.plot(
            *zip(*points, strict=True), linewidth=0.8, alpha=0.5, label=f"training, segment {i + 1}"
        )


def loops(metrics: list[dict[str, Any]], path: Path) -> None:
    """The stream's RMS by loop; where experts are, their loads' spread and overlap by loop."""
    lines = [m for m in metrics if "residual_rms" in m]
    if not lines:
        return
    routed = "router_overlap" in lines[-1]
    figure = Figure(figsize=(13 if routed else 5, 4), layout="constrained")
    panels = figure.subplots(1, 3 if routed else 1, squeeze=False)[0]
    _by_loop(panels[0], lines, "residual_rms", "RMS of the stream at a loop's end")
    if routed:
        _by_loop(panels[1], lines, "load_spread", "std / mean of the experts' loads")
        title = f"cosine of loads between loops, step {lines[-1]['step']}"
        _loop_matrix(panels[2], lines[-1]["router_overlap"], title, 0)
    save_figure(figure, path)


def _by_loop(axes: Any, lines: list[dict[str, Any]], key: str, title: str) -> None:
    """One line a loop, over the steps."""
    lines, count = _alike(lines, key)
    for loop in range(count):
        shade = colormaps["viridis"](loop / max(1, count - 1))
        points = [(m["step"], m[key][loop]) for m in lines]
        axes.plot(*zip(*points, strict=True), color=shade, label=str(loop + 1))
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(title="loop", fontsize="small", ncols=1 + count // 8)


def _log_if_wide(axes: Any) -> None:
    """From 0 up, or logarithmic where the values differ by more than ten times."""
    values = [float(y) for line in axes.get_lines() for y in line.get_ydata()]
    if min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(values) or 1)


def _log(axes: Any) -> None:
    """Logarithmic, with plain numbers at the ticks: for values not far from 1."""
    axes.set_yscale("log")
    for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        which(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.4)))


def _whole(axes: Any) -> None:
    """Ticks of the x axis at whole numbers alone."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _loop_matrix(axes: Any, values: list[list[float]], title: str, low: float) -> None:
    """A loops x loops heatmap from `low` to 1."""
    count = len(values)
    edges = (0.5, count + 0.5, count + 0.5, 0.5)
    image = axes.imshow(values, vmin=low, vmax=1, extent=edges)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.figure.colorbar(image, ax=axes)
    axes.set_title(title)
    axes.set_xlabel("loop")
    axes.set_ylabel("loop")
