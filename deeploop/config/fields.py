"""Declare, list, check and serialise the fields of a configuration's dataclasses.

A field is `name: Annotated[type, flag(help), marks...] = default`; its marks are a `Limit`
on its value and `MAY_CHANGE`, for a field that a resumed run may give another value.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro

from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief

MAX_INT, MAX_SEED = 2**31 - 1, 2**63 - 1  # largest value of an integer field; of a seed
MAY_CHANGE = "may change when a run is resumed"


class Limit(NamedTuple):
    """The range of a number, and the words in which an error states it."""

    low: float
    words: str
    open_low: bool = False
    high: float = 3e38  # the largest float32, about

    def admits(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        return above and value < self.high and math.isfinite(value)


POSITIVE = Limit(0, "greater than 0", open_low=True)
NOT_NEGATIVE = Limit(0, "0 or more")
FRACTION = Limit(0, "at least 0 and less than 1", high=1)
LOGIT = Limit(-30, "between -30 and 30", high=30)
SHARE = Limit(0, "from 0 to 1", high=1 + 2**-52)  # 1 included
POSITIVE_SHARE = Limit(0, "greater than 0 and at most 1", open_low=True, high=1 + 2**-52)


def flag(text: str, *aliases: str, choices: Collection[str] = ()) -> Any:
    """Give a field its help text, further names on the command line, and the values it takes."""
    metavar = "{" + ",".join(choices) + "}"
    return tyro.conf.arg(help=text, aliases=aliases, metavar=metavar if choices else None)


class Entry(NamedTuple):
    """One field of a configuration, under its dotted name."""

    name: str
    value: Any
    type: Any
    limit: Limit | None
    may_change: bool


def entries(section: Any, prefix: str = "") -> Iterator[Entry]:
    """List every field of a configuration and of its sections."""
    for entry in _section_entries(section, prefix):
        if _is_section(entry.type):
            yield from entries(entry.value, f"{entry.name}.")
        else:
            yield entry


def _section_entries(section: Any, prefix: str) -> Iterator[Entry]:
    """List the fields of one section; a section inside it is an entry, not opened."""
    section_type: Any = type(section)
    plain, full = _hints(section_type)
    for name, field_type in plain.items():
        marks = getattr(full[name], "__metadata__", ())
        limit = next((x for x in marks if isinstance(x, Limit)), None)
        value = getattr(section, name)
        yield Entry(prefix + name, value, field_type, limit, MAY_CHANGE in marks)


@functools.cache
def _hints(section_type: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the types of a dataclass's fields, without and with their marks (slow to find)."""
    return get_type_hints(section_type), get_type_hints(section_type, include_extras=True)


def _is_section(field_type: Any) -> bool:
    return isinstance(field_type, type) and dataclasses.is_dataclass(field_type)


def check_fields(section: Any, prefix: str = "") -> None:
    """Refuse a field of the wrong type or outside its limit; raises InputError naming it.

    Each section calls this when it is made, so that sections inside it are checked already.

    Args:
        section: instance of a configuration's dataclass.
        prefix: dotted name of the section with a dot at its end, such as `model.moe.`.
    """
    listed = list(_section_entries(section, prefix))
    for entry in listed:
        _check_type(entry)
    for entry in listed:
        if entry.limit is not None and not entry.limit.admits(entry.value):
            raise InputError(f"{entry.name}={entry.value}: must be {entry.limit.words}")


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Refuse a value that is not one of a registry's names; raises InputError naming the field."""
    if value not in choices:
        raise InputError(f"{name}={brief(repr(value))}: must be one of {', '.join(choices)}")


def _check_type(entry: Entry) -> None:
    """Refuse a value of another type than the field's: a file can hold one, a flag cannot."""
    value, field_type, choices = entry.value, entry.type, get_args(entry.type)
    if get_origin(field_type) is Literal:
        fits, wanted = value in choices, f"one of {', '.join(choices)}"
    elif field_type is int:
        most = MAX_SEED if entry.name == "train.seed" else MAX_INT
        fits, wanted = type(value) is int and value <= most, f"an integer up to {most}"
    elif _is_section(field_type):
        fits, wanted = isinstance(value, field_type), f"a group of fields, {field_type.__name__}"
    else:
        allowed = choices or (field_type,)
        fits = type(value) in allowed or (float in allowed and type(value) is int)
        wanted = " or ".join(t.__name__ for t in allowed)
    if not fits:
        raise InputError(f"{entry.name}={brief(repr(value))}: must be {wanted}")


def replace(section: Any, path: list[str], values: dict[str, Any]) -> Any:
    """Copy a configuration with fields of the section at `path` replaced."""
    if not path:
        return dataclasses.replace(section, **values)
    name, *rest = path
    return dataclasses.replace(section, **{name: replace(getattr(section, name), rest, values)})


def build(section_type: Any, values: dict[str, Any]) -> Any:
    """Make a dataclass, and the sections in it, out of nested dicts."""
    types = _hints(section_type)[0]
    nested = {
        name: build(types[name], value)
        for name, value in values.items()
        if _is_section(types.get(name)) and isinstance(value, dict)
    }
    return section_type(**values | nested)
