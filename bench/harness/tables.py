"""Records as Markdown: a section for each device and software, a table for each suite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bench.harness.markdown import lowest_to_highest, markdown_table, number, percent
from bench.harness.record import Record

PEERS = ("eager", "compile", "liger", "apex", "naive")  # of kernels, in their columns' order
TITLES = {
    "kernels": "Kernels",
    "step": "Training step by loops",
    "loom": "LOOM's training step by backprop and loops",
    "experts": "Routed experts, forward and backward",
    "optimizer": "Optimizer step with clipping",
    "decode": "Greedy decoding",
}


def strongest(
    record: Record, ours: str, among: list[str] | None = None
) -> tuple[str, float] | None:
    """Name the fastest baseline and its time over that of `ours`; None without a baseline.

    among: the baselines to choose from; by default the record's.
    """
    names = [n for n in (record["baselines"] if among is None else among) if n != ours]
    if not names:
        return None
    name = min(names, key=lambda n: time_ratio(record, n, ours))
    return name, time_ratio(record, name, ours)


def time_ratio(record: Record, name: str, ours: str) -> float:
    """Divide a contender's time by that of `ours`: without launches, or with those of both.

    The `seconds` of a contender that no CUDA graph could capture include its launches;
    `missing` names it, and both are then compared by `call_seconds`.
    """
    launched = "without a CUDA graph" in record["missing"].get(name, "")
    key = "call_seconds" if launched else "seconds"
    return record["contenders"][name][key] / record["contenders"][ours][key]


def markdown(records: list[Record], others: list[Record]) -> str:
    """Format the records by device and software, then the benchmarks that wrote no record."""
    by_setting: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        keys = ("device", "processor", "torch", "triton", "commit")
        by_setting[tuple(record.get(key) for key in keys)].append(record)
    sections = [section(group) for group in by_setting.values()]
    if others:
        sections.append(other_table(others))
    return "\n\n".join(sections)


def section(records: list[Record]) -> str:
    """Format all records of one device and software."""
    first = records[0]
    processor = f" ({first['processor']})" if first.get("processor") else ""
    blocks = [
        f"## {first['device']}{processor}",
        f"torch {first['torch']}, triton {first['triton']}, Python {first['python']}, "
        f"commit {first['commit']}; ours runs on {first['path']}; {ceilings(records)}.",
    ]
    for suite in dict.fromkeys(record["suite"] for record in records):
        chosen = [record for record in records if record["suite"] == suite]
        blocks += [f"### {TITLES.get(suite, suite)}", SUITES.get(suite, general)(chosen)]
        reasons = {f"{name}: {why}" for record in chosen for name, why in record["missing"].items()}
        if reasons:
            blocks += ["Missing:", "\n".join(f"- {reason}" for reason in sorted(reasons))]
    return "\n\n".join(blocks)


def ceilings(records: list[Record]) -> str:
    """List the device's measured ceilings and its clocks, each lowest to highest."""
    copies = lowest_to_highest(r["copy_gb_per_s"] for r in records)
    measured = [f"copy bandwidth {copies} GB/s"]
    products: dict[str, list[float]] = defaultdict(list)
    clocks: dict[str, list[float]] = defaultdict(list)
    for record in records:
        if "matmul_tflop_per_s" in record:
            products[record["dtype"]].append(record["matmul_tflop_per_s"])
        for name, value in record.get("clocks", {}).items():
            clocks[name.replace("_", " ")].append(value)
    measured += [
        f"{dtype} matrix product {lowest_to_highest(products[dtype])} TFLOP/s"
        for dtype in sorted(products)
    ]
    text = ", ".join(measured) + " measured here"
    if clocks:
        megahertz = [f"{name} {lowest_to_highest(values)}" for name, values in clocks.items()]
        text += "; MHz: " + ", ".join(megahertz)
    return text


def ratios(record: Record, name: str, columns: list[str]) -> list[str]:
    """Format each baseline's time over that of `name`, then the strongest baseline's."""
    cells = [
        f"{time_ratio(record, other, name):.2f}" if other in record["contenders"] else "-"
        for other in columns
    ]
    best = strongest(record, name)
    return [*cells, f"**{best[1]:.2f}** ({best[0]})" if best else "-"]


def kernels(records: list[Record]) -> str:
    """Format a row for each op, direction, shape and dtype."""
    head = ["op", "", "rows x d", "dtype", "floor, passes", "us", "spread", "us per call"]
    head += ["GB/s", "of copy"]
    head += [*(f"{name} / ours" for name in PEERS), "strongest / ours", "peak, MiB"]
    order = [record["case"]["op"] for record in records]
    rows = []
    for record in sorted(records, key=lambda r: order.index(r["case"]["op"])):
        case, entry = record["case"], record["contenders"]["ours"]
        rows.append(
            [
                case["op"], case["direction"], f"{case['rows']} x {case['d']}", record["dtype"],
                f"{record['floor_passes']:g}", f"{entry['seconds'] * 1e6:.1f}",
                percent(entry["spread"]), f"{entry['call_seconds'] * 1e6:.1f}",
                number(entry["gb_per_s"]), percent(entry["of_copy"]),
                *ratios(record, "ours", list(PEERS)), number(entry["peak_bytes"], 2**-20),
            ]
        )  # fmt: skip
    return (
        "GB/s is the op's floor in bytes over time; `us` excludes launch overhead on CUDA, "
        "`us per call` includes it; spread is the middle half of the rounds over their median."
        "\n\n" + markdown_table(head, rows, 4)
    )


def general(records: list[Record]) -> str:
    """Format a row for each case and contender of this package."""
    fields = list(records[0]["case"])
    baselines = list(dict.fromkeys(name for r in records for name in r["baselines"]))
    entries = [c for r in records for c in r["contenders"].values()]
    on_gpu = any(c["kernel_seconds"] is not None for c in entries)
    counts_tokens = any(c["tokens_per_s"] is not None for c in entries)
    head = [*fields, "dtype", "ours", "ms", "spread"]
    head += ["ms per call", "ms in kernels"] if on_gpu else []
    head += ["tokens/s"] if counts_tokens else []
    head += ["GB/s", "of copy", "TFLOP/s", "of matmul", "peak, MiB"]
    head += [*(f"{name} / ours" for name in baselines), "strongest / ours"]
    rows = []
    for record in records:
        for name in record["ours"]:
            c = record["contenders"][name]
            row = [*(str(record["case"][field]) for field in fields), record["dtype"], name]
            row += [number(c["seconds"], 1e3), percent(c["spread"])]
            if on_gpu:
                row += [number(c["call_seconds"], 1e3), number(c["kernel_seconds"], 1e3)]
            row += [number(c["tokens_per_s"])] if counts_tokens else []
            row += [number(c["gb_per_s"]), percent(c["of_copy"])]
            row += [number(c["tflop_per_s"]), percent(c["of_matmul"])]
            row += [number(c["peak_bytes"], 2**-20), *ratios(record, name, baselines)]
            rows.append(row)
    return (
        "GB/s and TFLOP/s divide the fewest bytes and the FLOPs of the work by the time of ours; "
        "data that fits into a cache may exceed the copy bandwidth.\n\n"
        + markdown_table(head, rows, len(fields) + 2)
    )


def loom(records: list[Record]) -> str:
    """Format time, memory and FLOP rate of LOOM's step, by backprop and loops."""
    tables = []
    for model, batch in dict.fromkeys((r["case"]["model"], r["case"]["batch"]) for r in records):
        chosen = [r for r in records if (r["case"]["model"], r["case"]["batch"]) == (model, batch)]
        chosen.sort(key=lambda r: r["case"]["loops"])
        name = f"{model}, {batch} sequences, {chosen[0]['dtype']}"
        for title, cell in (
            ("step, ms (over that of `full`)", relative_to_full("seconds", 1e3)),
            ("peak memory, MiB (over that of `full`)", relative_to_full("peak_bytes", 2**-20)),
            ("TFLOP/s of the model (of the matrix product's)", flop_rate),
        ):
            tables.append(f"{name}: {title}\n\n{by_loops(chosen, cell)}")
    return "\n\n".join(tables)


def by_loops(records: list[Record], cell: Callable[[Record, str], str]) -> str:
    """Format a row for each contender and a column for each number of loops."""
    names = dict.fromkeys(name for record in records for name in record["contenders"])
    head = ["backprop", *(f"H = {record['case']['loops']}" for record in records)]
    rows = [
        [f"`{name}`", *(cell(r, name) if name in r["contenders"] else "" for r in records)]
        for name in sorted(names)
    ]
    return markdown_table(head, rows, 1)


def relative_to_full(key: str, scale: float) -> Callable[[Record, str], str]:
    """Make a cell: a scaled figure, and in brackets its ratio to that of full backprop."""

    def cell(record: Record, name: str) -> str:
        value = record["contenders"][name][key]
        full = record["contenders"].get("full", {}).get(key)
        return number(value, scale) + (f" ({value / full:.2f})" if full else "")

    return cell


def flop_rate(record: Record, name: str) -> str:
    """Format TFLOP/s, and in brackets its share of the matrix product's."""
    entry = record["contenders"][name]
    return f"{number(entry['tflop_per_s'])} ({percent(entry['of_matmul'])})"


def other_table(benchmarks: list[Record]) -> str:
    """Format the median and the notes of benchmarks that wrote no record."""
    rows = [
        [
            b["name"],
            "; ".join(f"{key}: {plain(value)}" for key, value in b["extra_info"].items()),
            f"{b['stats']['median'] * 1e3:.4g}",
        ]
        for b in benchmarks
    ]
    return "## Other\n\n" + markdown_table(["bench", "notes", "median, ms"], rows, 2)


def plain(value: Any) -> str:
    """Format a value from JSON without quotes and braces."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {plain(v)}" for key, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


SUITES: dict[str, Callable[[list[Record]], str]] = {"kernels": kernels, "loom": loom}
