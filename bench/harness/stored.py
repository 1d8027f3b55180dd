"""Results from JSON files, with the names of earlier versions replaced by today's.

Stored files are never rewritten; the report and the experiments read them through `read_json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deeploop.utils.errors import InputError

KEYS = {"arm": "residual", "plan": "backprop"}
VALUES = {("residual", "baseline"): "pre_norm"}  # by today's key and the earlier value
FLAGS = {  # of `deeploop train`; a run's flags are its key in a file of runs
    "--model.arm baseline": "--model.residual pre_norm",
    "--model.arm": "--model.residual",
    "--train.plan-loops": "--train.backprop-loops",
    "--train.plan": "--train.backprop",
}


def read_json(path: Path) -> Any:
    """Read a file of results; raises InputError if it cannot be read or is not JSON."""
    try:
        return renamed(json.loads(path.read_text()))
    except OSError as error:
        raise InputError(f"{path}: could not be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error})") from error


def renamed(value: Any) -> Any:
    """Replace earlier keys, values and flags anywhere in a value from JSON."""
    if isinstance(value, list):
        return [renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        (name := today(key)): VALUES.get((name, item), item)
        if isinstance(item, str)
        else renamed(item)
        for key, item in value.items()
    }


def today(key: str) -> str:
    """Replace an earlier key, or the earlier flags in a run's flags."""
    for earlier, flag in FLAGS.items():
        key = key.replace(earlier, flag)
    return KEYS.get(key, key)
