"""The pictures of a run's folder."""

from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from deeploop.disk import atomic_file


def _save(figure: Figure, path: Path) -> None:
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
    _save(figure, path)


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
        panels[2].set_title(f"cosine of loads between loops, step {lines[-1]['step']}")
        count = len(lines[-1]["router_overlap"])
        edges = (0.5, count + 0.5, count + 0.5, 0.5)
        image = panels[2].imshow(lines[-1]["router_overlap"], vmin=0, vmax=1, extent=edges)
        figure.colorbar(image, ax=panels[2])
        panels[2].set_xlabel("loop")
        panels[2].set_ylabel("loop")
    _save(figure, path)


def _by_loop(axes: Any, lines: list[dict[str, Any]], key: str, title: str) -> None:
    """One line a loop, over the steps."""
    lines, count = _alike(lines, key)
    for loop in range(count):
        shade = colormaps["viridis"](loop / max(1, count - 1))
        points = [(m["step"], m[key][loop]) for m in lines]
        axes.plot(*zip(*points, strict=True), color=shade, label=str(loop + 1))
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.legend(title="loop", fontsize="small", ncols=1 + count // 8)
