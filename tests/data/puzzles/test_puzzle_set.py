"""HRM's and TRM's folders are read as they are; what is damaged is refused in one sentence."""

import json
import os

import numpy as np
import pytest
import torch

from deeploop.data.batches import IGNORE
from deeploop.data.puzzles import open_both, open_puzzles
from deeploop.utils.errors import InputError
from tests.helpers.puzzles import ARRAYS, write_foreign


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_examples_are_those_of_the_files(tmp_path, dtype):
    train, test = open_both(write_foreign(tmp_path, dtype))
    inputs, targets, puzzles = test.read(np.array([4, 0, 3]))
    labels = ARRAYS["labels"][[4, 0, 3]]
    assert inputs.dtype == targets.dtype == puzzles.dtype == torch.int64
    assert (inputs.numpy() == ARRAYS["inputs"][[4, 0, 3]]).all()
    assert (targets.numpy() == np.where(labels == 0, IGNORE, labels)).all()
    assert puzzles.tolist() == [3, 1, 2]
    assert (train.vocab_size, train.seq_len, train.identifiers) == (6, 4, 4)
    assert (train.examples_count, train.puzzles_count, train.groups_count) == (5, 3, 2)
    assert train.names() == ["<blank>", "a", "b", "c"]


def test_inputs_and_labels_stay_on_disk(tmp_path):
    arrays = open_puzzles(write_foreign(tmp_path), "train").arrays
    assert isinstance(arrays.inputs, np.memmap) and isinstance(arrays.labels, np.memmap)


def test_the_last_held_out_batch_is_shorter(tmp_path):
    test = open_puzzles(write_foreign(tmp_path), "test")
    batches = list(test.held_out(3))
    assert [len(batch.inputs) for batch in batches] == [3, 2]
    assert torch.cat([b.inputs for b in batches]).tolist() == ARRAYS["inputs"].tolist()
    assert torch.cat([b.puzzles for b in batches]).tolist() == [1, 1, 2, 2, 3]
    some = test.draw(seed=5, count=3)
    assert len(set(some.tolist())) == 3 and some.max() < 5
    assert torch.equal(next(test.held_out(8, some)).inputs, test.read(some).inputs)
    assert test.draw(seed=5, count=9).tolist() == [0, 1, 2, 3, 4]


def test_optional_facts(tmp_path):
    write_foreign(tmp_path, meta={"total_puzzles": 3, "ignore_label_id": None})
    test = open_puzzles(tmp_path, "test")
    assert test.meta.total_puzzles == 3
    assert (test.read(np.array([0, 1])).targets.numpy() == ARRAYS["labels"][:2]).all()
    with pytest.raises(InputError, match=r"test_puzzles\.json"):
        test.test_puzzles()
    (tmp_path / "test_puzzles.json").write_text('{"a": {"train": [], "test": []}}')
    assert list(test.test_puzzles()) == ["a"]
    (tmp_path / "identifiers.json").unlink()
    with pytest.raises(InputError, match=r"identifiers\.json"):
        test.names()


def test_a_label_to_ignore_need_not_be_in_the_vocabulary(tmp_path):
    labels = ARRAYS["labels"].copy()
    labels[0] = -7
    write_foreign(tmp_path, np.int64, {"ignore_label_id": -7}, {"labels": labels})
    assert open_puzzles(tmp_path, "test").read(np.array([0])).targets.tolist() == [[IGNORE] * 4]


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"sets": ["../../secret"]}, r"dataset\.json: sets is"),
        ({"sets": ["all", "more"]}, "sets is"),
        ({"sets": [3]}, "sets is"),
        ({"vocab_size": None}, "has no 'vocab_size'"),
        ({"vocab_size": "6"}, "vocab_size is 6, not of type int"),
        ({"seq_len": 1 << 40}, "seq_len is"),
        ({"seq_len": 5}, "has 4 tokens an example"),
        ({"pad_id": 6}, "pad_id is 6"),
        ({"blank_identifier_id": -1}, "blank_identifier_id is -1"),
        ({"num_puzzle_identifiers": 3}, "has identifier 3"),
        ({"total_groups": 3}, "has 3 offsets; must have 4"),
    ],
)
def test_wrong_facts_are_refused(tmp_path, meta, said):
    write_foreign(tmp_path, meta=meta)
    with pytest.raises(InputError, match=said):
        open_puzzles(tmp_path, "train")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"labels": None}, "all__labels.npy: cannot be read"),
        ({"labels": ARRAYS["labels"][:4]}, "has 4 examples, but there are 5 inputs"),
        ({"inputs": ARRAYS["inputs"][0]}, r"has shape \(4,\)"),
        ({"inputs": ARRAYS["inputs"][:0]}, r"has shape \(0, 4\)"),
        ({"puzzle_identifiers": np.array([1, -2, 3])}, "has identifier -2"),
        ({"puzzle_identifiers": np.array([1.0, 2, 3])}, "has dtype float64"),
        ({"puzzle_identifiers": np.array([1, 2, 3], object)}, "has dtype object"),
        ({"puzzle_identifiers": np.array([1, 2, 3], ">i4")}, "has dtype >i4"),
        ({"puzzle_indices": np.array([0, 4, 2, 5])}, "offsets must grow"),
        ({"puzzle_indices": np.array([0, 2, 2, 5])}, "offsets must grow"),
        ({"puzzle_indices": np.array([1, 2, 4, 5])}, "offsets must grow from 0"),
        ({"puzzle_indices": np.array([0, 2, 4, 6])}, "to the 5 examples"),
        ({"puzzle_indices": np.array([0, 2, 5])}, "has 3 offsets; must have 4"),
        ({"group_indices": np.array([0, 2, 4])}, "to the 3 puzzles"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, arrays, said):
    write_foreign(tmp_path, arrays=arrays)
    with pytest.raises(InputError, match=said):
        open_puzzles(tmp_path, "train")


def test_ids_outside_of_the_vocabulary_are_refused_where_they_are_read(tmp_path):
    inputs = ARRAYS["inputs"].copy()
    inputs[3, 1] = 6
    train = open_puzzles(write_foreign(tmp_path, arrays={"inputs": inputs}), "train")
    train.read(np.array([0, 1, 2]))
    with pytest.raises(InputError, match="inputs of example 3 has the id 6, outside"):
        train.read(np.array([1, 3]))


def test_damaged_files_are_refused(tmp_path):
    file = write_foreign(tmp_path) / "train" / "all__inputs.npy"
    whole = file.read_bytes()
    for damaged, said in (
        (whole[:-1], "has 19 bytes of numbers, but shape"),
        (whole + b"0", "has 21 bytes of numbers"),
        (whole.replace(b"(5, 4)", b"(9, 4)"), "has 20 bytes of numbers"),
        (whole.replace(b"(5, 4)", b"(-5,4)"), "is not a .npy file"),
        (whole.replace(b"False", b"True "), "Fortran"),
        (whole[:40], "is not a .npy file"),
        (b"", "is not a .npy file"),
        (b"PK\x03\x04" + whole, "is not a .npy file"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=said) as refused:
            open_puzzles(tmp_path, "train")
        assert "\n" not in str(refused.value)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(InputError, match="is a named pipe"):
        open_puzzles(tmp_path, "train")


def test_other_folders_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"has no train/dataset\.json"):
        open_puzzles(tmp_path, "train")
    with pytest.raises(InputError, match="split='val'"):
        open_puzzles(write_foreign(tmp_path), "val")
    (tmp_path / "train" / "dataset.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="nested too deeply"):
        open_puzzles(tmp_path, "train")
    for text, said in (('["a"]', "has 1 names"), ('{"a": 1}', "is not a list of names")):
        (tmp_path / "identifiers.json").write_text(text)
        with pytest.raises(InputError, match=said):
            open_puzzles(tmp_path, "test").names()


def test_splits_that_do_not_match_are_refused(tmp_path):
    write_foreign(tmp_path, splits=["train"])
    write_foreign(tmp_path, splits=["test"], meta={"vocab_size": 7})
    with pytest.raises(InputError, match="vocab_size is 6 in train and 7 in test"):
        open_both(tmp_path)


def test_the_identity_of_a_set_changes_with_its_content(tmp_path):
    one, same, other = (tmp_path / name for name in "abc")
    labels = ARRAYS["labels"].copy()
    labels[4, 3] = 3
    for folder, changed in ((one, {}), (same, {}), (other, {"labels": labels})):
        folder.mkdir()
        write_foreign(folder, arrays=changed)
    facts = [open_puzzles(folder, "train").identity() for folder in (one, same, other)]
    assert facts[0] == facts[1] != facts[2] and json.dumps(facts)
