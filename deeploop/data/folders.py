"""Choose the files of a folder that are trained on and those that are held out, by name."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deeploop.data.readers import READERS, file_format
from deeploop.utils.errors import InputError

SPLIT_NAME = re.compile(r"(?<![a-z])(train|val|dev|test)(?:ing|id|idation)?(?![a-z])", re.I)
SHOWN = 4  # names in a remark


def split_of(name: str) -> Literal["train", "val", "test"] | None:
    """Return the split a file's name says: its last word of train, val, valid, dev or test."""
    words = [word.lower() for word in SPLIT_NAME.findall(name)]
    if not words:
        return None
    return "train" if words[-1] == "train" else "test" if words[-1] == "test" else "val"


@dataclass(frozen=True)
class Chosen:
    """Files to train on and to hold out, in order of name, and the names of those not read."""

    train: list[Path]
    val: list[Path]  # empty where no name says so
    skipped: list[str]

    def remark(self) -> str:
        """Say in a few words which files are read and which are not."""
        many = "file" if len(self.train) == 1 else "files"
        text = f"trained on {len(self.train)} {many}"
        text += f" ({listed(file.name for file in self.train)})"
        if self.val:
            text += f", held out {listed(file.name for file in self.val)}"
        return text + (f", not read {listed(self.skipped)}" if self.skipped else "")


def listed(names: Iterable[str]) -> str:
    """Join names, the first few of many."""
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more


def choose_by_name(folder: Path, files: Sequence[Path], skipped: Sequence[str] = ()) -> Chosen:
    """Sort files into splits by their names.

    Where a name says train, files that say no split are left out. Files that say test are
    never read. Raises InputError where nothing is left to train on.
    """
    splits = {file: split_of(file.name) for file in files}
    wanted = "train" if "train" in splits.values() else None
    train = [file for file in files if splits[file] == wanted]
    val = [file for file in files if splits[file] == "val"]
    if not train:
        raise InputError(
            f"data folder {folder} has no training file, only {listed(f.name for f in files)}; "
            "name one of them train, or give a file itself"
        )
    left = [file.name for file in files if file not in train and file not in val]
    return Chosen(train, val, [*left, *skipped])


def text_files(source: Path) -> Chosen:
    """Choose ``source`` itself, or the text files of the folder by name.

    Files without an ending are read as text where the folder has no other text. Hidden
    files are not looked at.
    """
    try:
        entries = sorted(source.iterdir()) if source.is_dir() else [source]
        entries = [entry for entry in entries if entry == source or entry.name[0] != "."]
        known = [entry for entry in entries if entry.is_file() and file_format(entry) is not None]
    except OSError as error:
        raise InputError(f"data path {source} cannot be read ({error.strerror})") from error
    files = [file for file in known if file_format(file)] or known
    if not files:
        raise InputError(
            f"data path {str(source)!r} is not a corpus: give {', '.join(filter(None, READERS))} "
            "(also as .gz or .zst), text without an ending or .bin shards, as a regular file or as "
            "a folder of files"
        )
    if not source.is_dir():
        chosen = Chosen([source], [], [])
    else:
        skipped = [entry.name + "/" * entry.is_dir() for entry in entries if entry not in files]
        chosen = choose_by_name(source, files, skipped)
    for file in chosen.train + chosen.val:
        if not os.access(file, os.R_OK):
            raise InputError(f"data file {file} may not be read; change its permissions")
    return chosen
