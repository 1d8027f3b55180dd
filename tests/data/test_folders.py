"""A folder's files are trained on or held out by their names, and what is not read is said."""

import os

import numpy as np

from deeploop.data.corpus import load_corpus
from deeploop.data.folders import split_of, text_files
from deeploop.data.prepare import prepare
from deeploop.data.shards import write_shard
from tests.helpers.data import read_all, refused


def test_the_last_word_of_a_name_says_the_split():
    names = {
        "train": ["train.txt", "x_training-1.bin", "val_set_train_0.bin"],
        "val": ["val.txt", "valid.csv", "a.validation.jsonl.gz", "dev", "VAL_0.bin"],
        "test": ["test.txt", "fw_testing_0.bin"],
        None: ["carnival.txt", "interval.bin", "latest.txt", "protest", "devil.txt"],
    }
    assert {split: [n for n in ns if split_of(n) != split] for split, ns in names.items()} == {
        split: [] for split in names
    }


def test_held_out_text_is_not_trained_on(tmp_path, cache):
    for name in (
        "train.txt",
        "train2.txt",
        "valid.txt",
        "test.txt",
        "notes.txt",
        "a.pdf",
        "LICENSE",
    ):
        (tmp_path / name).write_text(f"this is {name}")
    (tmp_path / "more").mkdir()
    corpus = load_corpus(str(tmp_path), cache_dir=cache)
    assert bytes(read_all(corpus.train)) == b"this is train.txt\n\nthis is train2.txt"
    assert bytes(read_all(corpus.val)) == b"this is valid.txt"
    assert (corpus.train_bytes, corpus.val_bytes) == (len(corpus.train), len(corpus.val))
    assert "trained on 2 files (train.txt, train2.txt), held out valid.txt" in corpus.describe()
    assert "not read notes.txt, test.txt, LICENSE, a.pdf and 1 more" in corpus.describe()
    out = tmp_path / "shards"
    prepare(str(tmp_path), str(out), "byte")
    assert read_all(load_corpus(str(out)).val) == read_all(corpus.val)
    for name in ("train.txt", "train2.txt", "notes.txt"):
        (tmp_path / name).unlink()
    refused(lambda: load_corpus(str(tmp_path)), "no training file", "valid.txt")


def test_unnamed_files_are_trained_on_and_one_file_is_read_whatever_its_name(tmp_path, cache):
    for name in ("a.txt", "test.txt"):
        (tmp_path / name).write_text(f"this is {name}" * 3)
    assert bytes(read_all(load_corpus(str(tmp_path), cache_dir=cache).train)).startswith(
        b"this is a"
    )
    assert len(load_corpus(str(tmp_path / "test.txt")).train)


def test_files_without_an_ending_are_text_where_there_is_no_other(tmp_path):
    for name in ("wiki_00", "wiki_01", ".hidden"):
        (tmp_path / name).write_text("text")
    assert [file.name for file in text_files(tmp_path).train] == ["wiki_00", "wiki_01"]
    (tmp_path / "a.txt").write_text("text")
    assert text_files(tmp_path).remark() == "trained on 1 file (a.txt), not read wiki_00, wiki_01"


def test_test_shards_are_never_read(tmp_path):
    for name in ("train.bin", "val.bin"):
        np.arange(9, dtype="<u2").tofile(tmp_path / name)
    write_shard(tmp_path / "test.bin", [np.full(9, 7)], "<u2")
    corpus = load_corpus(str(tmp_path), vocab_size=9)
    assert read_all(corpus.train) == read_all(corpus.val) == list(range(9))
    assert "not read test.bin" in corpus.describe()


def test_only_regular_files_are_opened(tmp_path):
    for name in ("x.txt", "x.jsonl", "x.bin", "x.gz", "x"):
        os.mkfifo(tmp_path / name)
        refused(lambda n=name: load_corpus(str(tmp_path / n)), tmp_path / name, "regular file")
    refused(lambda: load_corpus("/dev/zero"), "/dev/zero", "regular file")
    (tmp_path / "meta.json").symlink_to("/dev/zero")
    refused(lambda: load_corpus(str(tmp_path)), "meta.json", "a device")
    refused(lambda: load_corpus("", str(tmp_path / "x.txt")), "x.txt", "a named pipe")


def test_nothing_is_held_out_on_request(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    corpus = load_corpus(str(tmp_path / "a.txt"), val_fraction=0)
    assert (len(corpus.train), len(corpus.val)) == (9, 0) and corpus.bytes_per_token is None
    out = tmp_path / "out"
    meta = prepare(str(tmp_path / "a.txt"), str(out), "byte", val_fraction=0, shard_tokens=4)
    assert meta["tokens"] == {"train": 9, "val": 0} and len(meta["shards"]) == 3
    assert len(load_corpus(str(out), val_fraction=0).train) == 9
    assert len(load_corpus(str(out), val_fraction=0.3).val) == 2
