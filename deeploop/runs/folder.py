"""Choose and lock a run's folder; write and read config.json and corpus.json in it.

README.md beside this file lists the other files of a run.
"""

import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deeploop.config import Config
from deeploop.config.fields import entries
from deeploop.data.source import Source
from deeploop.utils.disk import (
    disk_errors,
    exclusive,
    exclusive_file,
    sync,
    user_path,
    write_json,
    write_text,
)
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief, read_bytes, read_json

CONFIG, CORPUS, LOCK = "config.json", "corpus.json", ".lock"
UNFINISHED = ".*.tmp"  # files that a killed process left half-written


def choose_run_folder(config: Config, parent: str = "runs", begin: bool = False) -> Path:
    """Return the folder of a new run, not created yet.

    Args:
        config: without `train.out`, the folder is PARENT/PRESET-RULE-TIME, which
            `claim_folder` makes unique.
        parent: folder of such a name.
        begin: accept a folder in which the same run was stopped before its first checkpoint.

    Raises:
        InputError: the folder is not empty, or a file.
    """
    name = config.train.out or f"{parent}/{default_name(config)}"
    folder = user_path(name, "train.out")
    if config.train.out:
        check_new(folder, config if begin else None)
    return folder


def check_new(folder: Path, config: Config | None = None) -> None:
    """Refuse a folder that is neither new nor empty.

    With a configuration, a folder passes in which the same run was stopped before its first
    checkpoint. Raises InputError, also where the configuration of that run is another one.
    """
    if not folder.exists() or (folder.is_dir() and is_empty(folder)):
        return
    name = str(folder)
    saved = any(folder.glob("checkpoints/step_*"))
    if config is not None and not saved and (folder / CONFIG).is_file():
        if differs := difference(read_config(folder / CONFIG), config):
            field, before, now = differs
            raise InputError(
                f"train.out={name!r}: a run with {field}={brief(before)} began in it, and this "
                f"one has {brief(now)}; choose another folder"
            )
        return
    onward = f", or go on with --resume {name}" if saved else ""
    raise InputError(f"train.out={name!r}: already exists; choose another folder{onward}")


def difference(a: Config, b: Config) -> tuple[str, Any, Any] | None:
    """Return the first field in which two runs differ and its values, None for the same run.

    The folder, the device, the preset's name and the places of the corpus and of other runs do not
    make another run.
    """
    free = {"preset", "train.out", "train.device", "data.path", "data.tokenizer"}
    free |= {"train.init", "train.teacher"}
    others = {entry.name: entry.value for entry in entries(b)}
    return next(
        (
            (entry.name, entry.value, others[entry.name])
            for entry in entries(a)
            if entry.name not in free and others[entry.name] != entry.value
        ),
        None,
    )


def is_empty(folder: Path) -> bool:
    """Return whether a folder holds nothing but what a process that was killed at once left."""
    left = {*folder.glob(UNFINISHED), folder / LOCK}
    return all(path in left for path in folder.iterdir())


def default_name(config: Config) -> str:
    """Return PRESET-RULE-TIME, without the residual rule where the preset's name has it."""
    rule = "" if config.model.residual in config.preset else f"-{config.model.residual}"
    return f"{config.preset}{rule}-{time.strftime('%Y%m%d-%H%M%S')}"


def claim_folder(folder: Path) -> Path:
    """Create a folder that no other process has, under a name that the user did not choose.

    Returns:
        `folder`, or where that exists, the first of `folder`-2, `folder`-3 and so on that does not.
    """
    with creating(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        mine = folder
        for number in itertools.count(2):
            try:
                mine.mkdir()
                break
            except FileExistsError:
                mine = folder.with_name(f"{folder.name}-{number}")
    return mine


@contextlib.contextmanager
def creating(folder: Path) -> Iterator[None]:
    """Raise InputError, naming train.out, where a folder cannot be created."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"train.out={str(folder)!r}: cannot be created ({error.strerror})"
        ) from error


@contextlib.contextmanager
def lock_run_folder(folder: Path, new: bool, config: Config | None = None) -> Iterator[bool]:
    """Create a run's folder if absent, and lock it against other processes.

    Args:
        folder: of a run or a profile.
        new: refuse a folder that is not empty (`check_new`, with `config`).
        config: of the run that begins.

    Yields:
        False where the file system has no locks, and a file in the folder stands for one.

    Raises:
        InputError: the folder cannot be created, or another process writes to it.
    """
    with creating(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder, wait=False) as locked, contextlib.ExitStack() as stack:
        if locked is False:
            raise InputError(
                f"train.out={str(folder)!r}: another process has started a run in it; "
                "wait for it or choose another folder"
            )
        if locked is None:
            with disk_errors(f"run folder {folder}", folder):
                mine = stack.enter_context(exclusive_file(folder / LOCK))
            if not mine:
                owner = brief(read_bytes(folder / LOCK).decode(errors="replace"))
                raise InputError(
                    f"train.out={str(folder)!r}: {owner} has started a run in it, and this file "
                    f"system has no locks to tell whether it still runs; if it does not, delete "
                    f"{folder / LOCK}"
                )
        if new:
            check_new(folder, config)
        yield bool(locked)


def clear_unfinished(folder: Path) -> None:
    """Delete the files that a killed process left half-written; the folder must be locked."""
    for path in folder.glob(UNFINISHED):
        if path.is_file():
            path.unlink(missing_ok=True)


def parse_config(text: str | bytes, what: str) -> Config:
    """Return the configuration in a JSON text; raises InputError naming `what`."""
    try:
        return Config.from_json(text)
    except InputError as error:
        raise InputError(f"{what}: {error}") from error


def read_config(path: Path, what: str = "") -> Config:
    """Read a config.json, of this version or an older one; raises InputError naming `what`."""
    what = what or str(path)
    return parse_config(read_bytes(path, what), what)


def read_corpus_file(folder: Path) -> dict[str, Any]:
    """Read corpus.json of a run or checkpoint; raises InputError if it is missing or damaged."""
    types = {"tokenizer?": (str, type(None)), "vocab_size?": int, "train_tokens?": int}
    return read_json(folder / CORPUS, f"run {folder}: {CORPUS}", types)


def write_run_files(folder: Path, config: Config, corpus: Source, floors: dict[str, float]) -> None:
    """Write config.json, corpus.json and the tokenizer's files.

    config.json is the first: a folder with nothing else can be told to be of this run.

    floors: by name, the nats per held-out token that simple guesses reach.
    """
    write_text(folder / CONFIG, config.to_json())
    with disk_errors(f"run folder {folder}", folder):
        spec = corpus.tokenizer.save(folder) if corpus.tokenizer else None
    write_json(
        folder / CORPUS,
        {
            "name": corpus.name,
            "tokenizer": spec,
            "vocab_size": corpus.vocab_size,
            **corpus.identity(),
            "floors_nats_per_token": floors,
        },
    )
    with disk_errors(f"run folder {folder}", folder):
        sync(folder.parent)
