"""Write and read metrics.jsonl: one line of figures per logged step and per validation."""

import json
from pathlib import Path
from typing import Any

from deeploop.utils.disk import disk_errors, write_text
from deeploop.utils.errors import InputError
from deeploop.utils.strict_json import to_json


class MetricsFile:
    """Append to a run's metrics.jsonl, one JSON object per line, on disk when `write` returns."""

    def __init__(self, folder: Path, start: int, write: bool = True):
        """Open the file and remove the lines after step `start`, whose steps are trained again.

        `write` is False on every rank but the main one: nothing is written there.
        """
        self.path, self.enabled = folder / "metrics.jsonl", write
        if not write:
            return
        past = [line for line in self.read() if line["step"] <= start]
        write_text(self.path, "".join(to_json(line) + "\n" for line in past))

    def write(self, **values: Any) -> None:
        """Append a line of figures, null where one is not finite; `step` must be among them."""
        if not self.enabled:
            return
        with disk_errors(str(self.path)), self.path.open("a") as file:
            file.write(to_json(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Return every complete line: a killed process or a full disk may leave half a last one.

        Raises InputError where a line is not a JSON object with a number `step`.
        """
        if not self.path.exists():
            return []
        lines: list[dict[str, Any]] = []
        try:
            for line in self.path.read_bytes().split(b"\n")[:-1]:
                lines.append(json.loads(line))
                lines[-1]["step"] += 0  # raises unless it exists and is a number
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{self.path}: line {len(lines) + 1} is not readable ({error}); fix or delete it"
            ) from error
        return lines
