"""Read command lines: a preset or run as the first word, then options of a dataclass."""

import argparse
import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import re
import textwrap
from typing import Annotated, Any, TypeVar

import tyro

from deeploop.config import Config
from deeploop.config.presets import SUMMARY, preset, presets
from deeploop.config.renames import FIELDS
from deeploop.utils.disk import user_path
from deeploop.utils.errors import InputError

T = TypeVar("T")
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]  # an option --x without a --no-x
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


class UnknownOptionError(InputError):
    """Options that a verb does not have, and lines with those that it has and that are similar."""

    def __init__(self, reason: str, suggestions: list[str]):
        super().__init__(reason)
        self.suggestions = suggestions


def parse(kind: type[T], **options: Any) -> T:
    """Call tyro.cli; raises InputError with one sentence in the place of tyro's box."""
    arguments = list(options.get("args", ()))
    for old, new in RENAMED_FLAGS.items():
        refuse_flag(arguments, old, f"is now {new}")
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
        refusal = refused_section(stop)
        if refusal is not None:
            raise refusal from None
        reason, suggestions = read_box(box.getvalue())
        if "PRESET" in options.get("prog", ""):
            refuse_late_preset(reason, arguments)
        if not suggestions:
            raise InputError(f"{reason}; see --help") from None
        raise UnknownOptionError(
            f"{reason}; see --help, or perhaps you meant", suggestions
        ) from None


def refused_section(stop: SystemExit) -> InputError | None:
    """Return the refusal that a section of the configuration raised, behind tyro's own error."""
    error: BaseException | None = stop
    while error is not None and not isinstance(error, InputError):
        error = error.__context__
    return error


def read_box(box: str) -> tuple[str, list[str]]:
    """Return the reason in the box that tyro prints, and its suggestions, a line each.

    Below a title the box has sections between rules: the error, similar options (each indented
    by four columns, its help by eight), and a pointer to the help. Where the terminal has no
    lines to draw, the rules are dashes and the box has no sides.
    """
    plain = re.sub(r"\x1b\[[\d;]*m", "", box).strip().partition("\n")[2]
    inside = re.sub(r"(?m)^\u2502|\u2502 *$", " ", plain)
    reason: list[str] = []
    suggestions: list[str] = []
    for section in re.split(r"(?m)^[ \u2500-\u257f-]{4,}$", inside):
        if section.strip().startswith("Perhaps you meant"):
            section = textwrap.dedent(section)
            _, *similar = re.split(r"\n {4}(?=-)", section)
            suggestions = [" ".join(option.split()) for option in similar]
        else:
            reason += section.split()
    words = re.split(r" (?:Argument helptext|For full helptext)", " ".join(reason))[0]
    return words.strip().rstrip("."), suggestions


def refuse_late_preset(reason: str, arguments: list[str]) -> None:
    """Raise InputError where tyro does not know a word and it is, or is like, a preset's name."""
    unknown = re.split(r"[, ]+", reason.partition("Unrecognized options: ")[2])
    values = {b for a, b in itertools.pairwise(unknown) if a.startswith("-")}
    for word in unknown:
        near = difflib.get_close_matches(word, presets(), n=1, cutoff=0.8)
        if word in arguments and word not in values and near:
            raise InputError(f"{word!r}: a preset comes before the options; put {near[0]} first")


def refuse_flag(arguments: list[str], flag: str, reason: str) -> None:
    """Raise InputError if an option that a verb does not have is among the arguments."""
    if any(word.split("=")[0] == flag for word in arguments):
        raise InputError(f"{flag}: {reason}; see --help")


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


def named_config(name: str | None, options: list[str]) -> tuple[Config, str | None]:
    """Return the configuration of a preset, of --config FILE, or of a run or checkpoint.

    Returns:
        The configuration, a run's without its folder and its device; the run's path, or None.
    """
    if name is None or name in presets() or early_option(options, "--config") is not None:
        return base_config(name, options), None
    if not os.path.exists(os.path.expanduser(name)):
        near = difflib.get_close_matches(name, presets(), n=1)
        others = f"did you mean {near[0]}?" if near else f"presets are {SUMMARY}"
        raise InputError(f"{name!r}: neither a run's folder or checkpoint nor a preset; {others}")
    from deeploop.runs.checkpoint import find

    return find(name).config.replace("train", out="", device="auto"), name
