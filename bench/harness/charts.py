"""Records as PNGs: share of the copy bandwidth, roofline, step time, LOOM's backprop."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bench.harness.record import Record
from bench.harness.tables import PEERS, TITLES, strongest


def draw(records: list[Record], folder: Path) -> list[Path]:
    """Write every chart that has records; with several devices, each file has its number."""
    folder.mkdir(parents=True, exist_ok=True)
    devices = list(dict.fromkeys(record["device"] for record in records))
    written = []
    for index, device in enumerate(devices):
        chosen = [record for record in records if record["device"] == device]
        for name, chart in CHARTS.items():
            figure = chart(chosen)
            if figure is None:
                continue
            written.append(folder / f"{name}{f'-{index}' if len(devices) > 1 else ''}.png")
            figure.savefig(written[-1], dpi=120)
    return written


def kernels(records: list[Record]) -> Figure | None:
    """Draw every contender's share of the copy bandwidth as a bar, one group for each case."""
    records = [record for record in records if record["suite"] == "kernels"]
    if not records:
        return None
    names = [n for n in ("ours", *PEERS) if any(n in r["contenders"] for r in records)]
    size = (10, 0.9 + 0.16 * len(records) * len(names))
    figure = Figure(figsize=size, layout="constrained")
    axes, height = figure.subplots(), 0.85 / len(names)
    for i, name in enumerate(names):
        bars = {
            k + i * height: 100 * record["contenders"][name]["of_copy"]
            for k, record in enumerate(records)
            if name in record["contenders"]
        }
        axes.barh(list(bars), list(bars.values()), height, label=name)
    labels = [
        f"{c['op']} {c['direction']}\n{c['rows']} x {c['d']} {r['dtype']}"
        for r, c in ((r, r["case"]) for r in records)
    ]
    axes.set_yticks([k + 0.4 for k in range(len(records))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"floor bytes / time, % of copy bandwidth ({records[0]['device']})")
    axes.legend(fontsize=8)
    return figure


class Point(NamedTuple):
    """One contender of one case under the roof."""

    suite: str
    ours: bool
    intensity: float  # FLOPs per byte of the floor
    rate: float  # TFLOP/s


def points(records: list[Record]) -> list[Point]:
    """Place each contender of ours and its strongest baseline, where FLOPs are counted."""
    result = []
    for record in records:
        for name in record["ours"]:
            best = strongest(record, name)
            for contender in (name, best[0]) if best else (name,):
                c = record["contenders"][contender]
                if c.get("flops"):
                    intensity = c["flops"] / c["floor_bytes"]
                    result.append(
                        Point(record["suite"], contender == name, intensity, c["tflop_per_s"])
                    )
    return result


def roof(intensity: float, copy: float, matmul: float) -> float:
    """Bound TFLOP/s by a copy bandwidth in GB/s and a matrix product's TFLOP/s."""
    return min(copy * intensity / 1e3, matmul)


def roofline(records: list[Record]) -> Figure | None:
    """Draw achieved FLOP/s over FLOPs per byte, under the ceilings measured on the device."""
    dots = points(records)
    if not dots:
        return None
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    records = [r for r in records if "matmul_tflop_per_s" in r]
    copy = statistics.median(r["copy_gb_per_s"] for r in records)
    low, high = (f(p.intensity for p in dots) for f in (min, max))
    for dtype, style in zip(sorted({r["dtype"] for r in records}), ("-", "--", ":"), strict=False):
        rates = [r["matmul_tflop_per_s"] for r in records if r["dtype"] == dtype]
        matmul = statistics.median(rates)
        edges = sorted({low / 2, matmul * 1e3 / copy, max(high, matmul * 1e3 / copy) * 2})
        line = [roof(x, copy, matmul) for x in edges]
        axes.plot(edges, line, "k", linestyle=style, label=f"copy, {dtype} matrix product")
    markers = itertools.cycle("os^Dv")
    suites = zip(dict.fromkeys(p.suite for p in dots), markers, strict=False)
    for index, (suite, marker) in enumerate(suites):
        for ours in (True, False):
            xy = [(p.intensity, p.rate) for p in dots if p.suite == suite and p.ours is ours]
            if xy:
                label = TITLES.get(suite, suite) if ours else None
                face = f"C{index}" if ours else "none"
                axes.scatter(*zip(*xy, strict=True), s=26, label=label, color=face,
                             edgecolors=f"C{index}", marker=marker)  # fmt: skip
    plain_log_ticks(axes)
    axes.set_xlabel("FLOPs of the work / bytes of its floor")
    axes.set_ylabel("TFLOP/s; filled: ours, hollow: the strongest baseline")
    axes.set_title(records[0]["device"])
    axes.legend(fontsize=8)
    return figure


def plain_log_ticks(axes: Any) -> None:
    """Make both axes logarithmic, with plain numbers at 1, 2 and 5 times the powers of ten."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=30))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)


def step(records: list[Record]) -> Figure | None:
    """Draw step time by loops, a line for each residual rule and contender."""
    records = sorted_by_loops(records, "step")
    if not records:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    residuals = dict.fromkeys(r["case"]["residual"] for r in records)
    for residual, style in zip(residuals, itertools.cycle(("-", "--")), strict=False):
        chosen = [r for r in records if r["case"]["residual"] == residual]
        lines_by_loops(axes, chosen, "seconds", 1e3, f"{residual}, ", style)
    finish(axes, "loops R", "ms a step")
    axes.set_title(records[0]["device"])
    axes.legend(fontsize=8)
    return figure


def loom(records: list[Record]) -> Figure | None:
    """Draw LOOM's peak memory and step time by loops, a line for each backprop."""
    records = sorted_by_loops(records, "loom")
    if not records:
        return None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines_by_loops(left, records, "peak_bytes", 2**-20)
    lines_by_loops(right, records, "seconds", 1e3)
    finish(left, "loops H", "peak memory, MiB")
    finish(right, "loops H", "ms a step")
    figure.suptitle(f"{records[0]['case']['model']}, {records[0]['device']}")
    right.legend(fontsize=8)
    return figure


def sorted_by_loops(records: list[Record], suite: str) -> list[Record]:
    chosen = [record for record in records if record["suite"] == suite]
    return sorted(chosen, key=lambda record: record["case"]["loops"])


def lines_by_loops(
    axes: Any, records: list[Record], figure: str, scale: float, prefix: str = "", style: str = "-"
) -> None:
    """Draw a scaled figure by loops, a line for each contender; colours follow the names."""
    names = sorted({name for record in records for name in record["contenders"]})
    for index, name in enumerate(names):
        chosen = [r for r in records if name in r["contenders"]]
        values = [(r["case"]["loops"], r["contenders"][name][figure]) for r in chosen]
        xy = [(loops, scale * value) for loops, value in values if value is not None]
        if xy:
            colour, label = colormaps["tab10"](index), f"{prefix}{name}"
            axes.plot(*zip(*xy, strict=True), style, marker=".", color=colour, label=label)


def finish(axes: Any, x: str, y: str) -> None:
    """Label the axes and start the y axis at 0."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)


CHARTS = {"kernels": kernels, "roofline": roofline, "step": step, "loom": loom}
