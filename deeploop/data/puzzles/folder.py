"""HRM's and TRM's folder of a puzzle data set: its files, and how they are checked.

    identifiers.json         the name of each puzzle identifier; the blank one is "<blank>"
    test_puzzles.json        ARC, TRM alone: the tasks of the test split
    train/, test/
        dataset.json                   the fields of `Metadata`
        SET__inputs.npy                [examples, seq_len]
        SET__labels.npy                [examples, seq_len]
        SET__puzzle_identifiers.npy    [puzzles]
        SET__puzzle_indices.npy        [puzzles + 1], the first example of each puzzle
        SET__group_indices.npy         [groups + 1], the first puzzle of each group

SET is the one name in `sets`, usually "all". A group is an original puzzle and its augmentations.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.puzzles.arrays import read_array
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import MAX_JSON, brief, foreign, read_bytes, read_json

SPLITS = ("train", "test")
METADATA, IDENTIFIERS, TEST_PUZZLES = "dataset.json", "identifiers.json", "test_puzzles.json"
BLANK = "<blank>"
MAX_SEQUENCE = 1 << 16  # tokens of an example
MAX_NAME = 512  # bytes of an identifier's name in JSON


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What dataset.json says; total_puzzles is None where it is absent, as in HRM's folders."""

    pad_id: int
    ignore_label_id: int | None
    blank_identifier_id: int
    vocab_size: int
    seq_len: int
    num_puzzle_identifiers: int
    total_groups: int
    mean_puzzle_examples: float
    total_puzzles: int | None
    sets: list[str]


METADATA_TYPES = {
    "pad_id": int, "ignore_label_id?": (int, type(None)), "blank_identifier_id": int,
    "vocab_size": int, "seq_len": int, "num_puzzle_identifiers": int, "total_groups": int,
    "mean_puzzle_examples": float, "total_puzzles?": (int, type(None)), "sets": list,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The five arrays of a split; inputs and labels are mapped files, the others int64."""

    inputs: np.ndarray
    labels: np.ndarray
    puzzle_identifiers: np.ndarray
    puzzle_offsets: np.ndarray
    group_offsets: np.ndarray


def read_metadata(path: Path) -> Metadata:
    """Read dataset.json; raises InputError where a field is absent, of another type or range."""
    found = read_json(path, types=METADATA_TYPES)
    values: dict[str, Any] = {f.name: found.get(f.name) for f in dataclasses.fields(Metadata)}
    meta = Metadata(**values)
    ranges = {
        "vocab_size": (1, 1 << 31), "seq_len": (1, MAX_SEQUENCE),
        "num_puzzle_identifiers": (1, 1 << 31), "pad_id": (0, meta.vocab_size - 1),
        "blank_identifier_id": (0, meta.num_puzzle_identifiers - 1),
    }  # fmt: skip
    for name, (least, most) in ranges.items():
        if not least <= getattr(meta, name) <= most:
            raise InputError(
                f"{path}: {name} is {brief(getattr(meta, name))}; must lie in {least} .. {most}"
            )
    sets = meta.sets
    if len(sets) != 1 or not isinstance(sets[0], str) or not _is_plain(sets[0]):
        raise InputError(
            f"{path}: sets is {brief(sets)}; must be one name of a set, such as ['all'] (split "
            "several into folders of their own)"
        )
    return meta


def _is_plain(name: str) -> bool:
    """Return whether a name is one of a file in its folder, and no path elsewhere."""
    return bool(name) and name.isprintable() and len(name) < 200 and not set(name) & set("/\\:")


def read_split(folder: Path, meta: Metadata) -> Arrays:
    """Read the arrays of a split's folder.

    Raises InputError where one is absent or damaged, or they do not fit each other or the
    metadata. The ids in inputs and labels are not read here: `PuzzleSet.read` checks them.
    """
    paths = {
        name: folder / f"{meta.sets[0]}__{name}.npy"
        for name in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
    }
    boards = [read_array(paths[name], 2, mapped=True) for name in ("inputs", "labels")]
    for name, board in zip(("inputs", "labels"), boards, strict=True):
        if board.shape[1] != meta.seq_len:
            raise InputError(
                f"{paths[name]}: has {board.shape[1]} tokens an example, but {METADATA} says "
                f"seq_len {meta.seq_len}; write the set again"
            )
    if len(boards[0]) != len(boards[1]):
        raise InputError(
            f"{paths['labels']}: has {len(boards[1])} examples, but there are {len(boards[0])} "
            "inputs; write the set again"
        )
    identifiers = read_array(paths["puzzle_identifiers"], 1).astype(np.int64)
    _check_range(paths["puzzle_identifiers"], identifiers, meta.num_puzzle_identifiers)
    puzzles = _read_offsets(paths["puzzle_indices"], len(identifiers), len(boards[0]), "examples")
    groups = _read_offsets(paths["group_indices"], meta.total_groups, len(identifiers), "puzzles")
    return Arrays(boards[0], boards[1], identifiers, puzzles, groups)


def _check_range(path: Path, identifiers: np.ndarray, limit: int) -> None:
    least, most = int(identifiers.min()), int(identifiers.max())
    if least < 0 or most >= limit:
        raise InputError(
            f"{path}: has identifier {least if least < 0 else most}, outside of the {limit} of "
            f"num_puzzle_identifiers; write the set again"
        )


def _read_offsets(path: Path, count: int, total: int, of: str) -> np.ndarray:
    """Read the starts of `count` ranges that follow each other from 0 to `total`: int64."""
    offsets = read_array(path, 1).astype(np.int64)
    if len(offsets) != count + 1:
        raise InputError(f"{path}: has {len(offsets)} offsets; must have {count + 1}")
    if offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) <= 0).any():
        raise InputError(
            f"{path}: its offsets must grow from 0 to the {total} {of} there are, without an empty "
            "range; write the set again"
        )
    return offsets


def read_identifiers(path: Path, count: int) -> list[str]:
    """Read the names of `count` puzzle identifiers; raises InputError where it holds others."""
    data = read_bytes(path, most=MAX_JSON + MAX_NAME * count)
    with foreign(str(path)):
        names = json.loads(data)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{path}: is not a list of names; restore the file")
    if len(names) != count:
        raise InputError(
            f"{path}: has {len(names)} names, but {METADATA} says num_puzzle_identifiers {count}; "
            "restore the file"
        )
    return names


def read_test_puzzles(path: Path) -> dict[str, Any]:
    """Read ARC's test tasks by name, which are not checked further."""
    return read_json(path, most=1 << 28)
