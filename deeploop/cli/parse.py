"""Read command lines: a preset or run as the first word, then options of a dataclass."""

import contextlib
import io
import re
from typing import Any, TypeVar

import tyro

from deeploop.config import Config
from deeploop.config.presets import preset
from deeploop.config.renames import FIELDS
from deeploop.utils.errors import InputError

T = TypeVar("T")
RENAMED_FLAGS = {
    f"--{old}".replace("_", "-"): f"--{new}".replace("_", "-") for old, new in FIELDS.items()
} | {"--plan": "--backprop"}


def parse(kind: type[T], **options: Any) -> T:
    """Call tyro.cli; raises InputError with one sentence in the place of tyro's box."""
    for old, new in RENAMED_FLAGS.items():
        if any(word.split("=")[0] == old for word in options.get("args", ())):
            raise InputError(f"{old}: is now {new}; see --help")
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        # The box has a title in its upper edge, then the error, then a pointer to the help.
        plain = re.sub(r"\x1b\[[\d;]*m", "", box.getvalue()).strip().partition("\n")[2]
        words = " ".join(re.sub(r"[\u2500-\u257f]|-{4,}", " ", plain).split())
        reason = re.split(r" (?:Argument helptext|For full helptext)", words)[0].rstrip(".")
        raise InputError(f"{reason}; see --help") from None


def first_word(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Separate the preset or run before the options (None without one) from the options."""
    named = bool(arguments) and not arguments[0].startswith("-")
    return (arguments[0], arguments[1:]) if named else (None, arguments)


def named_preset(name: str | None) -> Config:
    """Return a preset by name; None is the default one."""
    return preset("deeploop-tiny" if name is None else name)
