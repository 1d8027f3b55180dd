"""Markdown, plots and regressions from the JSON that pytest-benchmark writes.

    python -m bench.harness.report FILE.json... [--plots FOLDER]
    python -m bench.harness.report FILE.json... --against OLD.json... [--tolerance 1.10]

Several files make one report. Records (`bench.harness.record`) of the same device and software
form a section with a table for each suite: ours with its share of the device's measured
ceilings, every baseline as its time over ours, and the strongest of them (over 1: ours is
faster). Any other benchmark is listed with its median and its notes.

--plots draws kernels.png (share of the copy bandwidth), roofline.png, step.png (step time by
loops) and loom.png (time and memory by backprop and loops), each if it has records.

--against compares with stored results of the same device and number of threads, case by case:
the ratio to the strongest baseline that both files have, time and peak memory. Changes by more
than the tolerance are listed; the exit code is 1 if one of them is for the worse. Results of
another machine or number of threads are not compared: the report says so, and the exit code is 2
if there are no others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.harness.record import Record
from bench.harness.regressions import compare
from bench.harness.stored import read_json
from bench.harness.tables import markdown
from deeploop.utils.errors import InputError


def load(paths: list[Path]) -> tuple[list[Record], list[Record]]:
    """Read all benchmarks of pytest-benchmark's files.

    Returns:
        The records, and the benchmarks that wrote none.

    Raises:
        InputError: a file cannot be read or lacks what a report needs.
    """
    records: list[Record] = []
    others: list[Record] = []
    for path in paths:
        content = read_json(path)
        try:
            for benchmark in content["benchmarks"]:
                if "contenders" in benchmark["extra_info"]:
                    records.append(complete(benchmark["extra_info"]))
                else:
                    benchmark["name"], benchmark["stats"]["median"]
                    others.append(benchmark)
        except (KeyError, TypeError) as error:
            raise InputError(f"{path}: is not what pytest-benchmark writes") from error
    if not records and not others:
        raise InputError(f"no benchmark ran in {', '.join(map(str, paths))}")
    return records, others


def complete(info: Record) -> Record:
    """Bring a stored record into the form that `bench.harness.record` writes today.

    The first kernel results had no suite. Raises KeyError or TypeError if a field that the
    report needs is missing.
    """
    if "suite" not in info:
        case = {key: info[key] for key in ("op", "direction", "rows", "d")}
        baselines = [name for name in info["contenders"] if name != "ours"]
        info = info | {"suite": "kernels", "case": case, "baselines": baselines, "ours": ["ours"]}
    for key in ("device", "dtype", "copy_gb_per_s", "suite", "case", "missing"):
        info[key]
    for name in (*info["ours"], *info["baselines"]):
        info["contenders"][name]["seconds"]
    return info


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.harness.report", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plots", type=Path, help="also draw PNGs into this folder")
    parser.add_argument("--against", nargs="+", type=Path, help="compare with these results")
    parser.add_argument("--tolerance", type=float, default=1.1, help="factor that is no change")
    options = parser.parse_args(argv)
    try:
        if not options.tolerance >= 1:
            raise InputError(f"--tolerance {options.tolerance}: must be a factor of at least 1")
        records, others = load(options.files)
        before = load(options.against)[0] if options.against else None
        text, worse = ("", False) if before is None else compare(records, before, options.tolerance)
    except InputError as error:
        print(f"bench.harness.report: {error}", file=sys.stderr)
        return 2
    print(markdown(records, others))
    if text:
        print(f"\n{text}")
    if options.plots:
        from bench.harness import charts  # matplotlib is slow to import

        for path in charts.draw(records, options.plots):
            print(f"written: {path}", file=sys.stderr)
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
