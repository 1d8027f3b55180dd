"""Markdown, plots and regressions from the JSON that pytest-benchmark writes.

    python -m bench.report FILE.json... [--plots FOLDER] [--against OLD.json [--tolerance 1.10]]

Several files make one report. Records (`bench.record`) of the same device and software stand
together, in a table for each suite: ours with its share of the device's measured ceilings,
every baseline as its time over ours, and ours against the strongest of them (over 1: ours is
faster). Any other benchmark is listed with its median and what it noted down.

--plots draws kernels.png (shares of the copy bandwidth), roofline.png, step.png (step time by
loops) and loom.png (time and memory by plan and loops), whichever there are records for.

--against compares with stored results, case by case: the ratio to the strongest baseline that
both know and, on the same device, time and peak memory. What is worse by more than the
tolerance is named, and the exit code is 1; what is better by as much is told, too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench.record import Record
from bench.regressions import compare
from bench.tables import markdown
from deeploop.utils.errors import InputError


def load(paths: list[Path]) -> tuple[list[Record], list[Record]]:
    """Records, and benchmarks that wrote none; raises InputError for what cannot be read."""
    benchmarks = []
    for path in paths:
        try:
            found = json.loads(path.read_text())["benchmarks"]
            for b in found:
                checked(b)
            benchmarks += found
        except OSError as error:
            raise InputError(f"{path}: could not be read ({error.strerror})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: is not what pytest-benchmark writes") from error
    if not benchmarks:
        raise InputError(f"no benchmark ran in {', '.join(map(str, paths))}")
    records = [normalised(b["extra_info"]) for b in benchmarks if "contenders" in b["extra_info"]]
    return records, [b for b in benchmarks if "contenders" not in b["extra_info"]]


def checked(benchmark: Record) -> None:
    """Raises KeyError or TypeError where a report would miss something."""
    info = benchmark["extra_info"]
    if "contenders" not in info:
        benchmark["name"], benchmark["stats"]["median"]
        return
    record = normalised(info)
    for key in ("device", "dtype", "copy_gb_per_s", "suite", "case", "missing"):
        record[key]
    for name in (*record["ours"], *record["baselines"]):
        record["contenders"][name]["seconds"]


def normalised(info: Record) -> Record:
    """A record as `bench.record` writes it; the first kernel results had no suite."""
    if "suite" in info:
        return info
    case = {key: info[key] for key in ("op", "direction", "rows", "d")}
    baselines = [name for name in info["contenders"] if name != "ours"]
    return info | {"suite": "kernels", "case": case, "baselines": baselines, "ours": ["ours"]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plots", type=Path, help="also draw PNGs into this folder")
    parser.add_argument("--against", nargs="+", type=Path, help="compare with these results")
    parser.add_argument("--tolerance", type=float, default=1.1, help="factor that is still alike")
    options = parser.parse_args(argv)
    try:
        if not options.tolerance >= 1:
            raise InputError(f"--tolerance {options.tolerance}: must be a factor of at least 1")
        records, others = load(options.files)
        before = load(options.against)[0] if options.against else None
        text, worse = ("", False) if before is None else compare(records, before, options.tolerance)
    except InputError as error:
        print(f"bench.report: {error}", file=sys.stderr)
        return 2
    print(markdown(records, others))
    if text:
        print(f"\n{text}")
    if options.plots:
        from bench import charts  # matplotlib is slow to import

        for path in charts.draw(records, options.plots):
            print(f"written: {path}", file=sys.stderr)
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
