"""Records as PNGs: shares of the copy bandwidth, roofline, step time, LOOM's plans."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.figure import Figure

from bench.record import Record
from bench.tables import PEERS, TITLES, strongest


def draw(records: list[Record], folder: Path) -> list[Path]:
    """Every chart there is something for; numbered by device where there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    devices = list(dict.fromkeys(record["device"] for record in records))
    written = []
    for index, device in enumerate(devices):
        there = [record for record in records if record["device"] == device]
        for name, chart in CHARTS.items():
            figure = chart(there)
            if figure is None:
                continue
            written.append(folder / f"{name}{f'-{index}' if len(devices) > 1 else ''}.png")
            figure.savefig(written[-1], dpi=120)
    return written


def of_suite(records: list[Record], suite: str) -> list[Record]:
    return [record for record in records if record["suite"] == suite]


def kernels(records: list[Record]) -> Figure | None:
    """Bars: everyone's share of the copy bandwidth, one group a case."""
    records = of_suite(records, "kernels")
    names = [n for n in ("ours", *PEERS) if any(n in r["contenders"] for r in records)]
    if not records:
        return None
    size = (10, 0.9 + 0.16 * len(records) * len(names))
    figure = Figure(figsize=size, layout="constrained")
    axes, height = figure.subplots(), 0.85 / len(names)
    for i, name in enumerate(names):
        there = [(k, r["contenders"].get(name)) for k, r in enumerate(records)]
        places = [k + i * height for k, c in there if c]
        shares = [100 * c["of_copy"] for _, c in there if c]
        axes.barh(places, shares, height, label=name)
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
    """Ours, and the strongest baseline of each, of the records that count FLOPs."""
    found = []
    for record in records:
        for name in record["ours"]:
            best = strongest(record, name)
            for who in (name, best[0]) if best else (name,):
                c = record["contenders"][who]
                if c.get("flops"):
                    place = c["flops"] / c["floor_bytes"], c["tflop_per_s"]
                    found.append(Point(record["suite"], who == name, *place))
    return found


def roof(intensity: float, copy: float, matmul: float) -> float:
    """TFLOP/s that a copy bandwidth in GB/s and a matrix product's TFLOP/s allow."""
    return min(copy * intensity / 1e3, matmul)


def roofline(records: list[Record]) -> Figure | None:
    """Achieved FLOP/s over FLOPs per byte, under the ceilings measured here."""
    there = points(records)
    if not there:
        return None
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    records = [r for r in records if "matmul_tflop_per_s" in r]
    copy = statistics.median(r["copy_gb_per_s"] for r in records)
    low, high = (f(p.intensity for p in there) for f in (min, max))
    for dtype, style in zip(sorted({r["dtype"] for r in records}), ("-", "--", ":"), strict=False):
        rates = [r["matmul_tflop_per_s"] for r in records if r["dtype"] == dtype]
        matmul = statistics.median(rates)
        edges = sorted({low / 2, matmul * 1e3 / copy, max(high, matmul * 1e3 / copy) * 2})
        line = [roof(x, copy, matmul) for x in edges]
        axes.plot(edges, line, "k", linestyle=style, label=f"copy, {dtype} matrix product")
    for index, suite in enumerate(dict.fromkeys(p.suite for p in there)):
        for mine in (True, False):
            dots = [(p.intensity, p.rate) for p in there if p.suite == suite and p.ours is mine]
            if dots:
                label = TITLES.get(suite, suite) if mine else None
                face = f"C{index}" if mine else "none"
                axes.scatter(*zip(*dots, strict=True), s=22, label=label, color=face,
                             edgecolors=f"C{index}")  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs of the work / bytes of its floor")
    axes.set_ylabel("TFLOP/s; filled: ours, hollow: the strongest baseline")
    axes.set_title(records[0]["device"])
    axes.legend(fontsize=8)
    return figure


def step(records: list[Record]) -> Figure | None:
    """Step time by loops, a line for each residual and contender."""
    records = sorted(of_suite(records, "step"), key=lambda r: r["case"]["loops"])
    if not records:
        return None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    residuals = dict.fromkeys(r["case"]["residual"] for r in records)
    for residual, style in zip(residuals, itertools.cycle(("-", "--")), strict=False):
        there = [r for r in records if r["case"]["residual"] == residual]
        by_loops(
            axes,
            there,
            "seconds",
            1e3,
            lambda name, residual=residual: f"{residual}, {name}",
            style,
        )
    axes.set_xlabel("loops R")
    axes.set_ylabel("ms a step")
    axes.set_ylim(bottom=0)
    axes.set_title(records[0]["device"])
    axes.legend(fontsize=8)
    return figure


def loom(records: list[Record]) -> Figure | None:
    """LOOM's peak memory and step time by loops, a line for each plan."""
    records = sorted(of_suite(records, "loom"), key=lambda r: r["case"]["loops"])
    if not records:
        return None
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    by_loops(left, records, "peak_bytes", 2**-20, str)
    by_loops(right, records, "seconds", 1e3, str)
    for axes, label in ((left, "peak memory, MiB"), (right, "ms a step")):
        axes.set_xlabel("loops H")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    figure.suptitle(f"{records[0]['case']['model']}, {records[0]['device']}")
    right.legend(fontsize=8)
    return figure


def by_loops(
    axes: Any,
    records: list[Record],
    figure: str,
    scale: float,
    label: Callable[[str], str],
    style: str = "-",
) -> None:
    """One line for each contender, in an order of colours that only depends on the names."""
    names = sorted({name for record in records for name in record["contenders"]})
    for index, name in enumerate(names):
        there = [r for r in records if name in r["contenders"]]
        dots = [(r["case"]["loops"], r["contenders"][name][figure]) for r in there]
        dots = [(loops, scale * value) for loops, value in dots if value is not None]
        if dots:
            colour = colormaps["tab10"](index)
            axes.plot(*zip(*dots, strict=True), style, marker=".", color=colour, label=label(name))


CHARTS = {"kernels": kernels, "roofline": roofline, "step": step, "loom": loom}
