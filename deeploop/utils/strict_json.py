"""Write JSON that every reader accepts: the standard has no NaN and no infinity."""

import json
import math
from typing import Any


def to_json(value: Any, indent: int | None = None) -> str:
    """Serialise a value, with null in the place of a number that is not finite."""
    return json.dumps(finite_or_null(value), indent=indent, allow_nan=False)


def finite_or_null(value: Any) -> Any:
    """Copy a value made of dicts, lists and numbers, with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_null(item) for item in value]
    return value
