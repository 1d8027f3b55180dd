"""Draw a run's loss.png and loops.png from the lines of its metrics.jsonl."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from deeploop.utils.figures import MOST_NAMES, Line, loop_matrix, save_figure, shaded_lines


def loss(metrics: list[dict[str, Any]], floors: dict[str, float], path: Path) -> None:
    """Plot training and held-out loss by step, in nats per token; the title is the run's folder.

    floors: by name, the loss that n-gram counts reach, drawn as dotted lines. Runs in
    segments show the loss of each segment.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    _segments(axes, metrics)
    count = _of_one_length(metrics, "segment_losses")[1]
    training_curve(axes, metrics, f"training, segment {count} (last)" if count else "training")
    held_out_curve(axes, metrics, "held out", "C1")
    for name, nats in floors.items():
        axes.axhline(nats, linestyle=":", linewidth=1, color="grey")
        axes.annotate(name, (1, nats), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_title(f"loss of {path.absolute().parent.name}")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("cross-entropy, nats per token")
    axes.legend()
    save_figure(figure, path)


def training_curve(
    axes: Any, metrics: list[dict[str, Any]], label: str, colour: Any = "C0"
) -> None:
    """Plot the training loss by step: its mean over a tenth of the run, and faintly itself."""
    points = [(m["step"], m["loss"]) for m in metrics if m.get("loss") is not None]
    if not points:
        return
    steps, losses = zip(*points, strict=True)
    reach = len(losses) // 20  # lines of metrics to either side
    if reach:
        axes.plot(steps, losses, linewidth=0.8, alpha=0.35, color=colour)
    axes.plot(steps, smoothed(losses, reach), color=colour, label=label)


def held_out_curve(
    axes: Any, metrics: list[dict[str, Any]], label: str, colour: Any, line: str = "-"
) -> None:
    """Plot the held-out loss by step, a dot for each validation."""
    points = [(m["step"], m["val_loss"]) for m in metrics if m.get("val_loss") is not None]
    if points:
        axes.plot(*zip(*points, strict=True), marker=".", linestyle=line, color=colour, label=label)


def smoothed(values: Sequence[float], reach: int) -> list[float]:
    """Return the mean of each value and of up to `reach` values to either side, equally many."""
    result = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        result.append(fmean(values[i - near : i + near + 1]))
    return result


def _of_one_length(metrics: list[dict[str, Any]], key: str) -> tuple[list[dict[str, Any]], int]:
    """Return the lines whose list under `key` is as long as in the newest line, and that length.

    A run resumed with other loops or segments has lines of another length before.
    """
    count = next((len(m[key]) for m in reversed(metrics) if key in m), 0)
    return [m for m in metrics if key in m and len(m[key]) == count], count


def _segments(axes: Any, metrics: list[dict[str, Any]]) -> None:
    """Plot the losses of all segments but the last, in thin lines from dark to light."""
    lines, count = _of_one_length(metrics, "segment_losses")
    names = [f"training, segment {i + 1}" for i in range(count - 1)]
    if len(names) > MOST_NAMES // 2:
        names = [f"training, segments 1 to {count - 1}: dark to light", *[""] * (count - 2)]
    for i, name in enumerate(names):
        points = [(m["step"], m["segment_losses"][i]) for m in lines]
        shade = colormaps["viridis"](i / max(1, count - 2))
        axes.plot(
            *zip(*points, strict=True), linewidth=0.8, alpha=0.6, color=shade, label=name or None
        )


def loops(metrics: list[dict[str, Any]], path: Path) -> None:
    """Plot the RMS of the residual stream at each loop's end, by step.

    Where a run has them, also its training loss after each loop, its held-out loss after
    train.eval_loops, and with experts the spread of their loads and the overlap between loops.
    """
    lines = [m for m in metrics if "residual_rms" in m]
    if not lines:
        return
    titles = {
        "residual_rms": "RMS of the residual stream at a loop's end",
        "loop_losses": "training loss after a loop, nats per token",
        "val_loop_losses": "held-out loss after a loop, nats per target",
        "val_loop_accuracies": "held-out examples right after a loop",
        "load_spread": "std / mean of the experts' loads",
    }
    keys = [key for key in titles if any(key in m for m in metrics)]
    routed = "router_overlap" in lines[-1]
    count = len(keys) + routed
    figure = Figure(figsize=(6 if count == 1 else 16 / 3 * count, 4), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, key in zip(panels, keys, strict=False):
        _by_loop(axes, metrics, key, titles[key])
    if routed:
        title = f"cosine of loads between loops, step {lines[-1]['step']}"
        loop_matrix(panels[-1], lines[-1]["router_overlap"], title, 0)
    save_figure(figure, path)


def _by_loop(axes: Any, metrics: list[dict[str, Any]], key: str, title: str) -> None:
    """Plot the values under `key`, one line per loop, over the steps that ran this loop."""
    points: dict[int, list[tuple[int, float]]] = {}
    for m in metrics:
        for loop, value in zip(_loop_numbers(m, key), m.get(key, ()), strict=False):
            if loop is not None and value is not None:
                points.setdefault(loop, []).append((m["step"], value))
    family = [Line(n, *zip(*points[n], strict=True)) for n in sorted(points)]
    if family:
        shaded_lines(axes, family, "loop")
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _loop_numbers(m: dict[str, Any], key: str) -> Sequence[int | None]:
    """Return the loops, from 1 on, of the values under `key` in a line of the metrics.

    Losses of a step are of its last segment alone, so of its last loops.
    """
    count = len(m.get(key, ()))
    if key.startswith("val_"):
        return m.get("val_loops", range(1, count + 1))
    last = int(m.get("loops") or count)
    return range(last - count + 1, last + 1)
