"""Records as Markdown: a section for each device and software, a table for each suite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bench.record import Record

PEERS = ("eager", "compile", "liger", "apex", "naive")  # of kernels, in their columns' order
TITLES = {
    "kernels": "Kernels",
    "step": "Training step by loops",
    "loom": "LOOM's training step by plan and loops",
    "experts": "Routed experts, forward and backward",
    "optimizer": "Optimizer step with clipping",
    "decode": "Greedy decoding",
}


def strongest(
    record: Record, ours: str, among: list[str] | None = None
) -> tuple[str, float] | None:
    """The fastest baseline (of some), and its time over that of `ours`; None without any."""
    names = [n for n in (record["baselines"] if among is None else among) if n != ours]
    if not names:
        return None
    name = min(names, key=lambda n: time_over(record, n, ours))
    return name, time_over(record, name, ours)


def time_over(record: Record, name: str, ours: str) -> float:
    """Time of a contender over that of `ours`: without launches, or of both with them.

    What no CUDA graph could hold has its launches in `seconds`, too; `missing` says so.
    """
    theirs, own = (record["contenders"][n] for n in (name, ours))
    launched = "without a CUDA graph" in record["missing"].get(name, "")
    key = "call_seconds" if launched else "seconds"
    return theirs[key] / own[key]


def markdown(records: list[Record], others: list[Record]) -> str:
    by_setting: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        keys = ("device", "processor", "torch", "triton", "commit")
        by_setting[tuple(record.get(key) for key in keys)].append(record)
    parts = [section(found) for found in by_setting.values()]
    if others:
        parts.append(other_table(others))
    return "\n\n".join(parts)


def section(records: list[Record]) -> str:
    """Everything of one device and software."""
    first = records[0]
    processor = f" ({first['processor']})" if first.get("processor") else ""
    parts = [
        f"## {first['device']}{processor}",
        f"torch {first['torch']}, triton {first['triton']}, Python {first['python']}, "
        f"commit {first['commit']}; ours runs on {first['path']}; {ceilings(records)}.",
    ]
    for suite in dict.fromkeys(record["suite"] for record in records):
        there = [record for record in records if record["suite"] == suite]
        parts += [f"### {TITLES.get(suite, suite)}", SUITES.get(suite, general)(there)]
        reasons = {f"{name}: {why}" for record in there for name, why in record["missing"].items()}
        if reasons:
            parts += ["Not there:", "\n".join(f"- {reason}" for reason in sorted(reasons))]
    return "\n\n".join(parts)


def ceilings(records: list[Record]) -> str:
    """What was measured on the device, and its clocks, as lowest to highest of the records."""
    said = [f"copy bandwidth {span(r['copy_gb_per_s'] for r in records)} GB/s"]
    for dtype in sorted({r["dtype"] for r in records if "matmul_tflop_per_s" in r}):
        rates = (
            r["matmul_tflop_per_s"]
            for r in records
            if r["dtype"] == dtype and "matmul_tflop_per_s" in r
        )
        said.append(f"{dtype} matrix product {span(rates)} TFLOP/s")
    text = ", ".join(said) + " measured here"
    clocks: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, value in record.get("clocks", {}).items():
            clocks[name].append(value)
    if clocks:
        text += "; MHz: " + ", ".join(f"{n.replace('_', ' ')} {span(v)}" for n, v in clocks.items())
    return text


def span(values: Any) -> str:
    texts = sorted({f"{value:.4g}" for value in values}, key=float)
    return " to ".join([texts[0], *texts[1:][-1:]])


def table(head: list[str], rows: list[list[str]], texts: int) -> str:
    """The first `texts` columns are text, the others numbers."""
    lines = [head, ["---"] * texts + ["---:"] * (len(head) - texts), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def number(value: float | None, scale: float = 1.0) -> str:
    """Three digits, or all in front of the point."""
    if value is None:
        return "-"
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def against(record: Record, name: str, columns: list[str]) -> list[str]:
    """Each baseline's time over that of `name`, and the strongest's."""
    there = record["contenders"]
    cells = [f"{time_over(record, n, name):.2f}" if n in there else "-" for n in columns]
    best = strongest(record, name)
    return [*cells, f"**{best[1]:.2f}** ({best[0]})" if best else "-"]


def kernels(records: list[Record]) -> str:
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
                share(entry["spread"]), f"{entry['call_seconds'] * 1e6:.1f}",
                number(entry["gb_per_s"]), share(entry["of_copy"]),
                *against(record, "ours", list(PEERS)), number(entry["peak_bytes"], 2**-20),
            ]
        )  # fmt: skip
    return (
        "GB/s is the op's floor in bytes over time; `us` has no launch overhead on CUDA, "
        "`us per call` has; spread is the middle half of the rounds over their median.\n\n"
        + table(head, rows, 4)
    )


def general(records: list[Record]) -> str:
    """A row for each case and contender of ours."""
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
            row += [number(c["seconds"], 1e3), share(c["spread"])]
            if on_gpu:
                row += [number(c["call_seconds"], 1e3), number(c["kernel_seconds"], 1e3)]
            row += [number(c["tokens_per_s"])] if counts_tokens else []
            row += [number(c["gb_per_s"]), share(c["of_copy"])]
            row += [number(c["tflop_per_s"]), share(c["of_matmul"])]
            row += [number(c["peak_bytes"], 2**-20), *against(record, name, baselines)]
            rows.append(row)
    return (
        "GB/s and TFLOP/s are the least bytes and the FLOPs of the work over the time of ours; "
        "what fits into a cache may pass the copy bandwidth.\n\n"
        + table(head, rows, len(fields) + 2)
    )


def loom(records: list[Record]) -> str:
    """Plans by loops: time, memory, and what the matrix products reach."""
    parts = []
    for model in dict.fromkeys((r["case"]["model"], r["case"]["batch"]) for r in records):
        there = [r for r in records if (r["case"]["model"], r["case"]["batch"]) == model]
        there.sort(key=lambda r: r["case"]["loops"])
        name = f"{model[0]}, {model[1]} sequences, {there[0]['dtype']}"
        for title, cell in (
            ("step, ms (over that of `full`)", over_full("seconds", 1e3)),
            ("peak memory, MiB (over that of `full`)", over_full("peak_bytes", 2**-20)),
            ("TFLOP/s of the model (of the matrix product's)", rate),
        ):
            parts.append(f"{name}: {title}\n\n{pivot(there, cell)}")
    return "\n\n".join(parts)


def pivot(records: list[Record], cell: Callable[[Record, str], str]) -> str:
    """A row for each contender, a column for each number of loops."""
    names = dict.fromkeys(name for record in records for name in record["contenders"])
    head = ["plan", *(f"H = {record['case']['loops']}" for record in records)]
    rows = [
        [f"`{name}`", *(cell(r, name) if name in r["contenders"] else "" for r in records)]
        for name in sorted(names)
    ]
    return table(head, rows, 1)


def over_full(key: str, scale: float) -> Callable[[Record, str], str]:
    def cell(record: Record, name: str) -> str:
        value = record["contenders"][name][key]
        full = record["contenders"].get("full", {}).get(key)
        return number(value, scale) + (f" ({value / full:.2f})" if full else "")

    return cell


def rate(record: Record, name: str) -> str:
    entry = record["contenders"][name]
    return f"{number(entry['tflop_per_s'])} ({share(entry['of_matmul'])})"


def other_table(benchmarks: list[Record]) -> str:
    rows = []
    for b in benchmarks:
        notes = "; ".join(f"{key}: {show(value)}" for key, value in b["extra_info"].items())
        rows.append([b["name"], f"{b['stats']['median'] * 1e3:.4g}", notes])
    head = "| bench | median, ms | notes |\n|---|---:|---|"
    return "\n".join(["## Other", "", head, *(f"| {' | '.join(row)} |" for row in rows)])


def show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(v)}" for key, v in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


SUITES: dict[str, Callable[[list[Record]], str]] = {"kernels": kernels, "loom": loom}
