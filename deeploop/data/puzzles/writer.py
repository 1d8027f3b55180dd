"""Write a puzzle data set in HRM's and TRM's format, complete or not at all."""

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.puzzles.arrays import write_arrays
from deeploop.data.puzzles.folder import IDENTIFIERS, METADATA, SPLITS, TEST_PUZZLES, Metadata
from deeploop.utils.disk import disk_errors, sync, user_path, write_text
from deeploop.utils.errors import InputError

SET = "all"
PAD = 0  # in inputs; in labels, no target
BLANK_IDENTIFIER = 0


@dataclasses.dataclass(frozen=True)
class Group:
    """An original puzzle and its augmentations, in this order.

    Args:
        inputs, labels: uint8 [examples, seq_len], those of one puzzle after another's.
        identifiers: int [puzzles].
        counts: int [puzzles], the examples of each puzzle.
    """

    inputs: np.ndarray
    labels: np.ndarray
    identifiers: np.ndarray
    counts: np.ndarray


def boards(inputs: np.ndarray, labels: np.ndarray) -> Group:
    """Make a group of puzzles with one example each and without identifiers.

    Args:
        inputs, labels: uint8 [puzzles, seq_len].
    """
    count = len(inputs)
    return Group(inputs, labels, np.full(count, BLANK_IDENTIFIER), np.ones(count, np.int64))


@dataclasses.dataclass(frozen=True)
class Written:
    """What was written of a split: its numbers of groups, puzzles and examples."""

    groups: int
    puzzles: int
    examples: int


class SetWriter:
    """Writes the files of one data set into a folder."""

    def __init__(self, folder: Path, vocab_size: int, seq_len: int):
        self.folder, self.vocab_size, self.seq_len = folder, vocab_size, seq_len
        self.written: dict[str, Written] = {}

    def split(self, split: str, groups: Iterable[Group], identifiers: int = 1) -> Written:
        """Write a split, one group after another, so that memory holds one of them.

        Args:
            split: "train" or "test".
            groups: at least one, each with at least one example.
            identifiers: number of puzzle identifiers, with the blank one.
        """
        folder = self.folder / split
        folder.mkdir()
        counts, sizes, names = [], [], []
        labels = folder / f"{SET}__labels.npy"
        with _Spool(folder / ".labels.tmp") as spool:

            def inputs() -> Iterator[np.ndarray]:
                for group in groups:
                    assert group.inputs.shape == group.labels.shape == (
                        int(group.counts.sum()), self.seq_len
                    )  # fmt: skip
                    counts.append(group.counts)
                    sizes.append(len(group.counts))
                    names.append(group.identifiers)
                    spool.add(group.labels)
                    yield group.inputs.astype(np.uint8)

            examples = write_arrays(folder / f"{SET}__inputs.npy", inputs())
            write_arrays(labels, spool.blocks(self.seq_len))
        for name, values in (
            ("puzzle_identifiers", np.concatenate(names)),
            ("puzzle_indices", np.cumsum(np.concatenate(([0], *counts)))),
            ("group_indices", np.cumsum([0, *sizes])),
        ):
            write_arrays(folder / f"{SET}__{name}.npy", [values.astype(np.int32)])
        result = Written(len(sizes), sum(sizes), examples)
        self._metadata(folder, result, identifiers)
        self.written[split] = result
        return result

    def _metadata(self, folder: Path, written: Written, identifiers: int) -> None:
        meta = Metadata(
            pad_id=PAD,
            ignore_label_id=PAD,
            blank_identifier_id=BLANK_IDENTIFIER,
            vocab_size=self.vocab_size,
            seq_len=self.seq_len,
            num_puzzle_identifiers=identifiers,
            total_groups=written.groups,
            mean_puzzle_examples=written.examples / written.puzzles,
            total_puzzles=written.puzzles,
            sets=[SET],
        )
        write_text(folder / METADATA, json.dumps(dataclasses.asdict(meta)))

    def names(self, names: Sequence[str]) -> None:
        """Write the names of the puzzle identifiers; the first is the blank one's."""
        write_text(self.folder / IDENTIFIERS, json.dumps(list(names)))

    def test_puzzles(self, puzzles: dict[str, Any]) -> None:
        """Write ARC's test tasks by name."""
        write_text(self.folder / TEST_PUZZLES, json.dumps(puzzles))


class _Spool:
    """Rows kept in a file until they are read again: two files grow from one pass over groups."""

    def __init__(self, path: Path):
        self.path, self.file = path, path.open("w+b")

    def __enter__(self) -> "_Spool":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()
        self.path.unlink()

    def add(self, rows: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(rows, np.uint8).tobytes())

    def blocks(self, width: int) -> Iterator[np.ndarray]:
        self.file.seek(0)
        while data := self.file.read(width * max(1, (1 << 20) // width)):
            yield np.frombuffer(data, np.uint8).reshape(-1, width)


@contextlib.contextmanager
def new_set(out: str, vocab_size: int, seq_len: int) -> Iterator[SetWriter]:
    """Write a data set's folder: it takes the name `out` once the block inside succeeds.

    Raises:
        InputError: `out` is neither new nor an empty folder, or the disk is full or read-only.
    """
    final = user_path(out, "output folder")
    check_absent(final)
    final = final.resolve()
    with disk_errors(f"output folder {out}", final):
        final.parent.mkdir(parents=True, exist_ok=True)
        # mkdtemp's folder may be entered by its owner alone, and so holds the set's.
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
        try:
            (work / "set").mkdir()
            writer = SetWriter(work / "set", vocab_size, seq_len)
            yield writer
            assert set(writer.written) == set(SPLITS)
            for folder in (*(work / "set" / split for split in SPLITS), work / "set"):
                sync(folder)
            check_absent(final)
            os.rename(work / "set", final)
            sync(final.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def check_absent(folder: Path) -> None:
    """Raise InputError where a folder to write exists and is not empty."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise InputError(f"output folder {folder}: exists already; give one that is new or empty")
