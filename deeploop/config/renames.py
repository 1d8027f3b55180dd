"""Names of fields, values and weights in files of older versions, and today's names.

A configuration or checkpoint written under the old names loads as if written today.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from deeploop.utils.errors import InputError

T = TypeVar("T")

FIELDS = {
    "model.arm": "model.residual",
    "train.plan": "train.backprop",
    "train.plan_loops": "train.backprop_loops",
}
VALUES = {  # of a field under today's name
    "model.residual": {"baseline": "pre_norm"},
    "model.moe.backend": {"loop": "reference"},
}
WEIGHTS = {  # patterns of keys of model.safetensors
    r"embedding\.weight": "embed_tokens.weight",
    r"untied\.weight": "lm_head.weight",
    r"gain_embedding": "norm_embed.weight",
    r"gain_final": "norm_final.weight",
    r"(sublayers\.\d+)\.gain_(in|out)": r"\1.norm_\2.weight",
}


def renamed_fields(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration's nested dict with today's field names and values."""
    renamed = {}
    for name, value in values.items():
        path = FIELDS.get(prefix + name, prefix + name)
        if isinstance(value, dict):
            value = renamed_fields(value, f"{path}.")
        elif isinstance(value, str):
            value = VALUES.get(path, {}).get(value, value)
        today = path.removeprefix(prefix)
        if today in renamed:
            raise InputError(f"{path}: given twice, also under an older name; give it once")
        renamed[today] = value
    return renamed


def renamed_weights(weights: Mapping[str, T]) -> dict[str, T]:
    """Return a model's weights under today's keys."""
    renamed = {}
    for key, value in weights.items():
        for old, new in WEIGHTS.items():
            if re.fullmatch(old, key):
                key = re.sub(old, new, key)
                break
        if key in renamed:
            raise InputError(f"weight {key}: stored twice, also under an older name")
        renamed[key] = value
    return renamed
