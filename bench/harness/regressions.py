"""Two sets of records against each other, case by case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.record import Record
from bench.tables import strongest
from deeploop.utils.errors import InputError

Key = tuple[str, str, str]


class Change(NamedTuple):
    """One figure of one contender of ours, then and now."""

    where: str
    what: str
    before: float
    now: float
    factor: float  # over 1: worse


def key(record: Record) -> Key:
    case = ", ".join(f"{name} {value}" for name, value in record["case"].items())
    return record["suite"], case, record["dtype"]


def changes(now: Record, before: Record) -> Iterator[Change]:
    """Of the contenders that both records have."""
    both = [name for name in now["contenders"] if name in before["contenders"]]
    baselines = [name for name in now["baselines"] if name in both]
    # A GPU's name says it all, a CPU's only how many threads there are.
    where_run = ("device",) if now["path"] == "triton" else ("device", "processor")
    same = all(now.get(k) == before.get(k) for k in where_run)
    for name in (name for name in now["ours"] if name in both):
        where = f"{', '.join(key(now))}, {name}"
        new, old = strongest(now, name, baselines), strongest(before, name, baselines)
        if new and old:
            title = "strongest baseline's time over ours"
            yield Change(where, title, old[1], new[1], old[1] / new[1])
        for what, figure in (("seconds", "seconds"), ("peak bytes", "peak_bytes")):
            a, b = (r["contenders"][name].get(figure) for r in (before, now))
            if same and a and b:
                yield Change(where, what, a, b, b / a)


def compare(now: list[Record], before: list[Record], tolerance: float) -> tuple[str, bool]:
    """What changed by more than a factor, in words; and whether anything became worse.

    Raises InputError where the two have no case in common.
    """
    old = {key(record): record for record in before}
    new = {key(record): record for record in now}
    common = [k for k in new if k in old]
    if not common:
        raise InputError("--against: the results have no case in common")
    found = [change for k in common for change in changes(new[k], old[k])]
    worse = [c for c in found if c.factor > tolerance]
    better = [c for c in found if c.factor < 1 / tolerance]
    lines = [
        f"## {len(common)} cases against stored ones, tolerance {tolerance:g}",
        "",
        f"{len(found)} figures: {len(worse)} worse, {len(better)} better; "
        f"{len(old) - len(common)} stored cases were not run.",
        "",
        *(line("worse", change) for change in sorted(worse, key=lambda c: -c.factor)),
        *(line("better", change) for change in sorted(better, key=lambda c: c.factor)),
    ]
    return "\n".join(lines).rstrip(), bool(worse)


def line(word: str, c: Change) -> str:
    factor = c.factor if word == "worse" else 1 / c.factor
    return f"- {word} by {factor:.2f}: {c.where}: {c.what} {c.before:.4g} -> {c.now:.4g}"
