"""Comparison of two sets of records of the same device and threads, case by case."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bench.harness.record import Record
from bench.harness.tables import strongest
from deeploop.utils.errors import InputError

Key = tuple[str, str, str]


class Change(NamedTuple):
    """One figure of one contender of this package in the stored and in the new results."""

    case: str
    figure: str
    before: float
    now: float
    factor: float  # over 1: worse


def key(record: Record) -> Key:
    """Identify a case by its suite, its parameters and its dtype."""
    case = ", ".join(f"{name} {value}" for name, value in record["case"].items())
    return record["suite"], case, record["dtype"]


def machine(record: Record) -> str:
    """Name the device: a GPU, or a CPU with its number of threads and its processor."""
    # A GPU's name identifies the machine; that of a CPU counts threads alone.
    if record["path"] == "triton" or not record.get("processor"):
        return record["device"]
    return f"{record['device']}, {record['processor']}"


def changes(now: Record, before: Record) -> Iterator[Change]:
    """Compare the figures of the contenders that both records of one machine have."""
    both = [name for name in now["contenders"] if name in before["contenders"]]
    baselines = [name for name in now["baselines"] if name in both]
    for name in (name for name in now["ours"] if name in both):
        case = f"{', '.join(key(now))}, {name}"
        new, old = strongest(now, name, baselines), strongest(before, name, baselines)
        if new and old:
            figure = "strongest baseline's time over ours"
            yield Change(case, figure, old[1], new[1], old[1] / new[1])
        for figure, field in (("seconds", "seconds"), ("peak bytes", "peak_bytes")):
            a, b = (r["contenders"][name].get(field) for r in (before, now))
            if a and b:
                yield Change(case, figure, a, b, b / a)


def compare(now: list[Record], before: list[Record], tolerance: float) -> tuple[str, bool]:
    """List the figures that changed by more than a factor, on the same machine and threads.

    Returns:
        Markdown, and whether a figure became worse.

    Raises:
        InputError: the two sets have no case in common, or none of the same machine.
    """
    old = {(key(record), machine(record)): record for record in before}
    new = {(key(record), machine(record)): record for record in now}
    common = [k for k in new if k in old]
    stored_cases = {case for case, _ in old}
    elsewhere = [(case, device) for case, device in new if case in stored_cases]
    elsewhere = [k for k in elsewhere if k not in old]
    if not common and not elsewhere:
        raise InputError("--against: the results have no case in common")
    machines = (
        f"measured on {listed(device for _, device in elsewhere)}, "
        f"stored on {listed(device for _, device in old)}"
    )
    if not common:
        raise InputError(
            f"--against: {machines}: only results of the same device and number of threads are "
            "compared"
        )
    figures = [change for k in common for change in changes(new[k], old[k])]
    worse = [c for c in figures if c.factor > tolerance]
    better = [c for c in figures if c.factor < 1 / tolerance]
    lines = [
        f"## {len(common)} cases against stored ones, tolerance {tolerance:g}",
        "",
        f"{len(figures)} figures: {len(worse)} worse, {len(better)} better; "
        f"{len(old) - len(common)} stored cases have no new result.",
        *([f"{len(elsewhere)} cases were not compared: {machines}."] if elsewhere else []),
        "",
        *(line("worse", c, c.factor) for c in sorted(worse, key=lambda c: -c.factor)),
        *(line("better", c, 1 / c.factor) for c in sorted(better, key=lambda c: c.factor)),
    ]
    return "\n".join(lines).rstrip(), bool(worse)


def listed(names: Iterable[str]) -> str:
    """Join the different names, sorted, with "and"."""
    return " and ".join(sorted(set(names)))


def line(word: str, c: Change, factor: float) -> str:
    return f"- {word} by {factor:.2f}: {c.case}: {c.figure} {c.before:.4g} -> {c.now:.4g}"
