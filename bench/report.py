"""Markdown (and bars) from the JSON that pytest-benchmark writes.

    python -m bench.report FILE.json... [--png FILE.png]

Several files make one report: kernel records (bench_kernels.py) of the same device
and software stand together, by op. They become one table per device: ours in
microseconds, GB/s and share of the device's copy bandwidth, every other contender
as its time over ours, and ours against the strongest of them (over 1: ours is
faster). Any other record is listed with its median and what it noted down.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

BASELINES = ("eager", "compile", "liger", "apex", "naive")
Record = dict[str, Any]


def load(paths: list[Path]) -> tuple[list[Record], list[Record]]:
    """Kernel records, and the rest."""
    benchmarks = [b for path in paths for b in json.loads(path.read_text())["benchmarks"]]
    kernels = [b["extra_info"] for b in benchmarks if "contenders" in b["extra_info"]]
    return kernels, [b for b in benchmarks if "contenders" not in b["extra_info"]]


def strongest(record: Record) -> tuple[str, float] | None:
    """The fastest contender that is not ours, and its time over ours."""
    contenders = record["contenders"]
    others = {name: c["seconds"] for name, c in contenders.items() if name != "ours"}
    if not others:
        return None
    name = min(others, key=lambda n: others[n])
    return name, others[name] / contenders["ours"]["seconds"]


def row(record: Record) -> str:
    contenders = record["contenders"]
    ours = contenders["ours"]
    cells = [
        record["op"],
        record["direction"],
        f"{record['rows']} x {record['d']}",
        record["dtype"],
        f"{record['floor_passes']:g}",
        f"{ours['seconds'] * 1e6:.1f}",
        f"{ours['spread']:.0%}",
        f"{ours['call_seconds'] * 1e6:.1f}",
        f"{ours['gb_per_s']:.3g}",
        f"{ours['of_copy']:.0%}",
    ]
    for name in BASELINES:
        there = name in contenders
        cells.append(f"{contenders[name]['seconds'] / ours['seconds']:.2f}" if there else "-")
    best = strongest(record)
    cells.append(f"**{best[1]:.2f}** ({best[0]})" if best else "-")
    peak = ours["peak_bytes"]
    cells.append("-" if peak is None else f"{peak / 2**20:.0f}")
    return "| " + " | ".join(cells) + " |"


def kernel_table(records: list[Record]) -> str:
    first = records[0]
    head = ["op", "", "rows x d", "dtype", "floor, passes", "us", "spread", "us per call"]
    head += ["GB/s", "of copy"]
    head += [*(f"{name} / ours" for name in BASELINES), "strongest / ours", "peak, MiB"]
    copies = sorted({f"{record['copy_gb_per_s']:.4g}" for record in records}, key=float)
    order = [record["op"] for record in records]
    records = sorted(records, key=lambda record: order.index(record["op"]))
    lines = [
        f"## {first['device']}",
        "",
        f"torch {first['torch']}, triton {first['triton']}, Python {first['python']}, "
        f"commit {first['commit']}; ours runs on {first['path']}; "
        f"copy bandwidth {' to '.join([copies[0], *copies[1:][-1:]])} GB/s measured here.",
        "",
        "GB/s is the op's floor in bytes over time; `us` has no launch overhead on CUDA, "
        "`us per call` has; spread is the middle half of the rounds over their median.",
        "",
        "| " + " | ".join(head) + " |",
        "|---|---|---|---|" + "---:|" * (len(head) - 4),
        *map(row, records),
    ]
    reasons = sorted(
        {f"{name}: {why}" for record in records for name, why in record["missing"].items()}
    )
    if reasons:
        lines += ["", "Not there:", "", *(f"- {reason}" for reason in reasons)]
    return "\n".join(lines)


def other_table(benchmarks: list[Record]) -> str:
    lines = ["## Other", "", "| bench | median, ms | notes |", "|---|---:|---|"]
    for b in benchmarks:
        notes = "; ".join(f"{key}: {show(value)}" for key, value in b["extra_info"].items())
        lines.append(f"| {b['name']} | {b['stats']['median'] * 1e3:.4g} | {notes} |")
    return "\n".join(lines)


def show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(v)}" for key, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(kernels: list[Record], others: list[Record]) -> str:
    by_device: dict[str, list[Record]] = defaultdict(list)
    for record in kernels:
        setting = (record[key] for key in ("device", "torch", "triton", "commit"))
        by_device["|".join(map(str, setting))].append(record)
    parts = [kernel_table(records) for records in by_device.values()]
    if others:
        parts.append(other_table(others))
    return "\n\n".join(parts)


def plot(records: list[Record], path: Path) -> None:
    """Bars: everyone's share of the copy bandwidth, one group per case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = ["ours", *BASELINES]
    names = [name for name in names if any(name in r["contenders"] for r in records)]
    figure, axes = plt.subplots(figsize=(10, 0.9 + 0.16 * len(records) * len(names)))
    height = 0.85 / len(names)
    for i, name in enumerate(names):
        places = [k + i * height for k, r in enumerate(records) if name in r["contenders"]]
        shares = [
            100 * r["contenders"][name]["of_copy"] for r in records if name in r["contenders"]
        ]
        axes.barh(places, shares, height, label=name)
    labels = [f"{r['op']} {r['direction']}\n{r['rows']} x {r['d']} {r['dtype']}" for r in records]
    axes.set_yticks([k + 0.4 for k in range(len(records))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"floor bytes / time, % of copy bandwidth ({records[0]['device']})")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--png", type=Path, help="also draw bars into this file")
    options = parser.parse_args(argv)
    for path in options.files:
        if not path.is_file():
            print(f"bench.report: no file {path}", file=sys.stderr)
            return 2
    kernels, others = load(options.files)
    if not kernels and not others:
        print("bench.report: no benchmark ran in these files", file=sys.stderr)
        return 2
    print(markdown(kernels, others))
    if options.png and kernels:
        plot(kernels, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
