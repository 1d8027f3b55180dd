"""What is written is read back as it was, byte for byte as np.save has it, or not at all."""

import io
import json

import numpy as np
import pytest

from deeploop.data.puzzles import open_puzzles
from deeploop.data.puzzles.writer import Group, boards, new_set
from deeploop.utils.errors import InputError


def groups(rng, count, size=6):
    """Groups of one to three puzzles with one to four examples each."""
    for _ in range(count):
        counts = rng.integers(1, 5, rng.integers(1, 4))
        shape = counts.sum(), size
        yield Group(
            rng.integers(0, 9, shape, np.uint8), rng.integers(0, 9, shape, np.uint8),
            rng.integers(0, 30, len(counts)), counts,
        )  # fmt: skip


def saved(array):
    """The bytes of np.save's file."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_a_written_set_is_read_back(tmp_path):
    out = tmp_path / "new" / "set"
    written = list(groups(np.random.default_rng(0), 50))
    with new_set(str(out), 9, 6) as writer:
        assert not out.exists()
        writer.split("train", iter(written), identifiers=30)
        writer.split("test", [boards(written[0].inputs, written[0].labels)], identifiers=30)
        writer.names([f"name {i}" for i in range(30)])
    assert [path.name for path in out.parent.iterdir()] == ["set"]
    train = open_puzzles(out, "train")
    arrays = {
        "inputs": np.concatenate([g.inputs for g in written]),
        "labels": np.concatenate([g.labels for g in written]),
        "puzzle_identifiers": np.concatenate([g.identifiers for g in written]).astype(np.int32),
        "puzzle_indices": np.cumsum([0, *(n for g in written for n in g.counts)]).astype(np.int32),
        "group_indices": np.cumsum([0, *(len(g.counts) for g in written)]).astype(np.int32),
    }
    for name, array in arrays.items():
        assert (out / "train" / f"all__{name}.npy").read_bytes() == saved(array), name
    assert (train.arrays.inputs == arrays["inputs"]).all()
    assert (train.arrays.labels == arrays["labels"]).all()
    assert (train.arrays.puzzle_identifiers == arrays["puzzle_identifiers"]).all()
    assert (train.arrays.puzzle_offsets == arrays["puzzle_indices"]).all()
    assert (train.arrays.group_offsets == arrays["group_indices"]).all()
    assert list(json.loads((out / "train" / "dataset.json").read_text())) == [
        "pad_id", "ignore_label_id", "blank_identifier_id", "vocab_size", "seq_len",
        "num_puzzle_identifiers", "total_groups", "mean_puzzle_examples", "total_puzzles", "sets",
    ]  # fmt: skip
    assert train.meta.mean_puzzle_examples == len(arrays["inputs"]) / train.puzzles_count
    assert (train.meta.total_puzzles, train.names()[29]) == (train.puzzles_count, "name 29")
    assert sorted(file.name for file in (out / "test").iterdir()) == sorted(
        ["dataset.json", *(f"all__{name}.npy" for name in arrays)]
    )


def test_nothing_is_left_of_a_set_that_failed(tmp_path):
    def failing():
        yield boards(np.ones((1, 4), np.uint8), np.ones((1, 4), np.uint8))
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"), new_set(f"{tmp_path}/a", 9, 4) as writer:
        writer.split("train", failing())
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    for name in ("file", "full"):
        with pytest.raises(InputError, match="exists already"), new_set(f"{tmp_path}/{name}", 9, 4):
            raise AssertionError("begun")
    (tmp_path / "empty").mkdir()
    one = boards(np.ones((1, 4), np.uint8), np.ones((1, 4), np.uint8))
    with new_set(f"{tmp_path}/empty", 9, 4) as writer:
        writer.split("train", [one])
        writer.split("test", [one])
    assert open_puzzles(tmp_path / "empty", "test").examples_count == 1
