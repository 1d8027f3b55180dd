"""Draw a run's loss.png and loops.png from the lines of its metrics.jsonl."""

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from deeploop.utils.figures import loop_matrix, save_figure


def loss(metrics: list[dict[str, Any]], floors: dict[str, float], path: Path) -> None:
    """Plot training and held-out loss by step, in nats per token.

    floors: by name, the loss that n-gram counts reach, drawn as dotted lines. Runs in
    segments show the loss of each segment.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    _segments(axes, metrics)
    count = _of_one_length(metrics, "segment_losses")[1]
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


def _of_one_length(metrics: list[dict[str, Any]], key: str) -> tuple[list[dict[str, Any]], int]:
    """Return the lines whose list under `key` is as long as in the newest line, and that length.

    A run resumed with other loops or segments has lines of another length before.
    """
    count = next((len(m[key]) for m in reversed(metrics) if key in m), 0)
    return [m for m in metrics if key in m and len(m[key]) == count], count


def _segments(axes: Any, metrics: list[dict[str, Any]]) -> None:
    """Plot the losses of all segments but the last, in thin lines."""
    lines, count = _of_one_length(metrics, "segment_losses")
    for i in range(count - 1):
        points = [(m["step"], m["segment_losses"][i]) for m in lines]
        axes.plot(
            *zip(*points, strict=True), linewidth=0.8, alpha=0.5, label=f"training, segment {i + 1}"
        )


def loops(metrics: list[dict[str, Any]], path: Path) -> None:
    """Plot the RMS of the residual stream at each loop's end, by step.

    With experts, also the spread of their loads by loop and the overlap between loops.
    """
    lines = [m for m in metrics if "residual_rms" in m]
    if not lines:
        return
    routed = "router_overlap" in lines[-1]
    figure = Figure(figsize=(13 if routed else 5, 4), layout="constrained")
    panels = figure.subplots(1, 3 if routed else 1, squeeze=False)[0]
    _by_loop(panels[0], lines, "residual_rms", "RMS of the residual stream at a loop's end")
    if routed:
        _by_loop(panels[1], lines, "load_spread", "std / mean of the experts' loads")
        title = f"cosine of loads between loops, step {lines[-1]['step']}"
        loop_matrix(panels[2], lines[-1]["router_overlap"], title, 0)
    save_figure(figure, path)


def _by_loop(axes: Any, lines: list[dict[str, Any]], key: str, title: str) -> None:
    """Plot the values under `key`, one line per loop, over the steps."""
    lines, count = _of_one_length(lines, key)
    for loop in range(count):
        shade = colormaps["viridis"](loop / max(1, count - 1))
        points = [(m["step"], m[key][loop]) for m in lines]
        axes.plot(*zip(*points, strict=True), color=shade, label=str(loop + 1))
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(title="loop", fontsize="small", ncols=1 + count // 8)
