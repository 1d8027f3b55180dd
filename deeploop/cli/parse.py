"""Read command lines: a preset or run as the first word, then options of a dataclass."""

import argparse
import contextlib
import dataclasses
import io
import re
from typing import Annotated, Any, TypeVar

import tyro

from deeploop.config import Config
from deeploop.config.presets import preset
from deeploop.config.renames import FIELDS
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError

T = TypeVar("T")
RENAMED_FLAGS = {
    f"--{old}".replace("_", "-"): f"--{new}".replace("_", "-") for old, new in FIELDS.items()
} | {"--plan": "--backprop"}


@dataclasses.dataclass
class ConfigArguments:
    """Options of a verb that takes a configuration: a file of one, and each of its fields."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    config_file: Annotated[
        str | None,
        tyro.conf.arg(
            name="config",
            metavar="FILE",
            help="start from this configuration, a run's config.json or what --print-config "
            "prints, in the place of a preset",
        ),
    ] = None


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


def early_option(arguments: list[str], flag: str) -> str | None:
    """Return the value of an option that the defaults of all others depend on."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument(flag, nargs="?", dest="value")  # tyro will refuse a missing value
    return early.parse_known_args(arguments)[0].value


def base_config(name: str | None, options: list[str]) -> Config:
    """Return the configuration that options start from: of --config FILE or of a preset.

    Raises InputError for both, for an unknown preset and for a file that holds none.
    """
    file = early_option(options, "--config")
    if file is None:
        return named_preset(name)
    if name is not None:
        raise InputError(f"--config {file!r}: takes the place of {name!r}; give one of the two")
    from deeploop.runs.folder import read_config

    return read_config(user_path(file, "--config"), f"--config {file!r}")
