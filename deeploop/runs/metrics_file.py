"""Write and read metrics.jsonl: one line of figures per logged step and per validation."""

import json
from pathlib import Path
from typing import Any

from deeploop.utils.disk import disk_errors, write_text
from deeploop.utils.foreign import brief, foreign, read_bytes
from deeploop.utils.strict_json import to_json

METRICS = "metrics.jsonl"
MOST_BYTES = 2**30
# Fields that are lists, by the depth to which they are nested; all others are numbers or null.
LISTS = {
    "segment_losses": 1,
    "loop_losses": 1,
    "val_loops": 1,
    "val_loop_losses": 1,
    "val_loop_accuracies": 1,
    "val_segment_accuracies": 1,
    "loop_shares": 1,
    "residual_rms": 1,
    "load_spread": 1,
    "router_overlap": 2,
}


class MetricsFile:
    """Append to a run's metrics.jsonl, one JSON object per line, on disk when `write` returns.

    Attributes:
        note: a sentence for the log if the last line was incomplete and has been dropped.
    """

    def __init__(self, folder: Path, start: int, write: bool = True):
        """Open the file and remove the lines after step `start`, whose steps are trained again.

        `write` is False on every rank but the main one: nothing is written there.
        """
        self.path, self.enabled, self.note = folder / METRICS, write, ""
        self.validated: set[int] = set()  # steps with a line of their validation
        if not write:
            return
        lines, torn = read_lines(self.path)
        if torn:
            self.note = f"{self.path}: its last line was incomplete ({brief(torn, 40)}), dropped"
        past = [line for line in lines if line["step"] <= start]
        self.validated = {line["step"] for line in past if "val_loss" in line}
        write_lines(self.path, past)

    def write(self, **values: Any) -> None:
        """Append a line of figures, null where one is not finite; `step` must be among them.

        A validation takes the place of an earlier one of the same step.
        """
        if not self.enabled:
            return
        if "val_loss" in values:
            if values["step"] in self.validated:
                write_lines(self.path, [x for x in self.read() if not _same(x, values)])
            self.validated.add(values["step"])
        with disk_errors(str(self.path), self.path), self.path.open("a") as file:
            file.write(to_json(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return every complete line; raises InputError where one is damaged."""
        return read_lines(self.path)[0]


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two lines are validations of one step."""
    return "val_loss" in a and "val_loss" in b and a["step"] == b["step"]


def copy_metrics(run: Path, folder: Path, step: int) -> None:
    """Begin a new run's metrics.jsonl with the lines of another up to a step."""
    write_lines(folder / METRICS, [x for x in read_lines(run / METRICS)[0] if x["step"] <= step])


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write a metrics.jsonl completely, or leave it as it was."""
    write_text(path, "".join(to_json(line) + "\n" for line in lines))


def read_lines(path: Path) -> tuple[list[dict[str, Any]], str]:
    """Read a metrics.jsonl; an absent one has no lines.

    Returns:
        Every complete line, and the text of an incomplete last one, which a killed process
        or a full disk may leave; "" without one.

    Raises:
        InputError: a line is not a JSON object of figures with an integer `step`.
    """
    if not path.exists():
        return [], ""
    *complete, torn = read_bytes(path, most=MOST_BYTES).split(b"\n")
    lines = []
    for number, text in enumerate(complete, 1):
        with foreign(f"{path}: line {number}", "fix or delete it"):
            lines.append(json.loads(text))
            _check(lines[-1])
    return lines, torn.decode(errors="replace")


def _check(line: Any) -> None:
    """Raise ValueError or TypeError for a line with fields of other types."""
    if type(line["step"]) is not int or not 0 <= line["step"] < 2**63:
        raise ValueError("step is not a positive integer")
    for name, value in line.items():
        if not _is_figure(value, LISTS.get(name, 0)):
            raise ValueError(f"{brief(name)} is {brief(value)}")


def _is_figure(value: Any, depth: int) -> bool:
    """Return whether a value is a number or null, or lists of these nested to `depth`."""
    if depth:
        items = value if isinstance(value, list) else []
        square = depth == 1 or all(isinstance(x, list) and len(x) == len(items) for x in items)
        return bool(items) and square and all(_is_figure(x, depth - 1) for x in items)
    return value is None or type(value) is float or (type(value) is int and abs(value) < 2**63)
