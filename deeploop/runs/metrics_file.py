"""Write and read metrics.jsonl, the figures of a run line by line."""

import json
from pathlib import Path
from typing import Any

from deeploop.utils.disk import disk_errors, write_text
from deeploop.utils.errors import InputError


class MetricsFile:
    """metrics.jsonl: one JSON object a line, flushed as it is written; by one rank alone."""

    def __init__(self, folder: Path, start: int, write: bool = True):
        """Keep the lines up to step `start`; what came later is trained again."""
        self.path, self.on = folder / "metrics.jsonl", write
        if not write:
            return
        kept = [line for line in self.read() if line["step"] <= start]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, **values: Any) -> None:
        if not self.on:
            return
        with disk_errors(str(self.path)), self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every line but one that a kill or a full disk has torn; InputError where unreadable."""
        if not self.path.exists():
            return []
        lines: list[dict[str, Any]] = []
        try:
            for line in self.path.read_bytes().split(b"\n")[:-1]:
                lines.append(json.loads(line))
                lines[-1]["step"] += 0  # there, and a number
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"{self.path}: line {len(lines) + 1} is not readable ({error}); mend or delete it"
            ) from error
        return lines
