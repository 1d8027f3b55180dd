"""Comparison of two sets of records, case by case."""

from __future__ import annotations

from collections.abc import Iterator
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


def changes(now: Record, before: Record) -> Iterator[Change]:
    """Compare the figures of the contenders that both records have."""
    both = [name for name in now["contenders"] if name in before["contenders"]]
    baselines = [name for name in now["baselines"] if name in both]
    # A GPU's name identifies the machine; a CPU's device name only counts threads.
    identity = ("device",) if now["path"] == "triton" else ("device", "processor")
    same_machine = all(now.get(k) == before.get(k) for k in identity)
    for name in (name for name in now["ours"] if name in both):
        case = f"{', '.join(key(now))}, {name}"
        new, old = strongest(now, name, baselines), strongest(before, name, baselines)
        if new and old:
            figure = "strongest baseline's time over ours"
            yield Change(case, figure, old[1], new[1], old[1] / new[1])
        for figure, field in (("seconds", "seconds"), ("peak bytes", "peak_bytes")):
            a, b = (r["contenders"][name].get(field) for r in (before, now))
            if same_machine and a and b:
                yield Change(case, figure, a, b, b / a)


def compare(now: list[Record], before: list[Record], tolerance: float) -> tuple[str, bool]:
    """List the figures that changed by more than a factor.

    Returns:
        Markdown, and whether a figure became worse.

    Raises:
        InputError: the two sets have no case in common.
    """
    old = {key(record): record for record in before}
    new = {key(record): record for record in now}
    common = [k for k in new if k in old]
    if not common:
        raise InputError("--against: the results have no case in common")
    figures = [change for k in common for change in changes(new[k], old[k])]
    worse = [c for c in figures if c.factor > tolerance]
    better = [c for c in figures if c.factor < 1 / tolerance]
    lines = [
        f"## {len(common)} cases against stored ones, tolerance {tolerance:g}",
        "",
        f"{len(figures)} figures: {len(worse)} worse, {len(better)} better; "
        f"{len(old) - len(common)} stored cases were not run.",
        "",
        *(line("worse", c, c.factor) for c in sorted(worse, key=lambda c: -c.factor)),
        *(line("better", c, 1 / c.factor) for c in sorted(better, key=lambda c: c.factor)),
    ]
    return "\n".join(lines).rstrip(), bool(worse)


def line(word: str, c: Change, factor: float) -> str:
    return f"- {word} by {factor:.2f}: {c.case}: {c.figure} {c.before:.4g} -> {c.now:.4g}"
