"""Shards of every layout are read, damaged ones refused, and written completely or not at all."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from deeploop.data.shards import claimed_folder, open_shard, open_shards, write_shard
from deeploop.utils.errors import InputError
from tests.helpers.data import read_all, refused, write_raw_shard

V1, V7 = (20240520, 1, "<u2"), (20240801, 7, "<u4")


@pytest.mark.parametrize(("magic", "version", "dtype"), [V1, V7])
def test_llmc_layouts_are_read(tmp_path, magic, version, dtype):
    tokens = [0, 7, np.iinfo(dtype).max, 3]
    path = write_raw_shard(tmp_path / "x.bin", tokens, magic, version, dtype)
    assert read_all(open_shard(path)) == tokens


def test_nanogpt_files_are_read_without_a_header(tmp_path):
    np.arange(5, dtype="<u2").tofile(tmp_path / "train.bin")
    assert read_all(open_shard(tmp_path / "train.bin")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_what_is_written_has_the_public_layout(tmp_path, dtype):
    blocks = [np.arange(4), np.arange(0), np.arange(9)]
    path = tmp_path / "x.bin"
    assert write_shard(path, blocks, dtype)[0] == 13
    magic, version, _ = V1 if dtype == "<u2" else V7
    expected = write_raw_shard(tmp_path / "y.bin", np.concatenate(blocks), magic, version, dtype)
    assert path.read_bytes() == expected.read_bytes()


def test_damaged_shards_are_refused_in_a_sentence(tmp_path):
    path = tmp_path / "x.bin"
    good = write_raw_shard(path, range(10)).read_bytes()

    def put(content: bytes):
        path.write_bytes(content)
        return lambda: open_shard(path)

    refused(put(b""), path, "empty")
    refused(put(good[:500]), path, "incomplete header", 500)
    refused(put(good[:-1]), path, "ntok 10", 19)
    refused(put(good[:-2]), path, "ntok 10", 18)
    refused(put(good + b"\0\0"), path, "ntok 10", 22)
    refused(put(good[4:]), path, "magic 1")
    refused(put(b"ab"), path, "magic None")
    refused(lambda: open_shard(write_raw_shard(path, range(3), version=2)), path, "version 2")
    refused(lambda: open_shard(write_raw_shard(path, range(3), ntok=-3)), path, "ntok -3")
    refused(lambda: open_shard(write_raw_shard(path, [])), path, "ntok 0")
    refused(lambda: open_shard(write_raw_shard(path, [1], *V1[:2], "<u4")), path, "ntok 1")
    (tmp_path / "val.bin").write_bytes(b"abc")
    refused(lambda: open_shard(tmp_path / "val.bin"), "3 bytes", "uint16")


def names_of(segments) -> list[str]:
    return [Path(segment.label).name for segment in segments]


def test_validation_shards_are_found_by_name(tmp_path):
    for name in ("fw_train_000001.bin", "fw_val_000000.bin", "fw_train_000002.bin"):
        write_raw_shard(tmp_path / name, range(3))
    found = open_shards(tmp_path)
    assert names_of(found.val) == ["fw_val_000000.bin"]
    assert names_of(found.train) == ["fw_train_000001.bin", "fw_train_000002.bin"]


def test_the_last_word_of_a_name_decides(tmp_path):
    for name in ("val_set_train_000001.bin", "VAL_set_VAL_000000.bin", "train_validation.bin"):
        write_raw_shard(tmp_path / name, range(3))
    assert names_of(open_shards(tmp_path).train) == ["val_set_train_000001.bin"]


def test_the_first_of_several_validates_where_no_name_says_so(tmp_path):
    for name in ("carnival_2.bin", "interval_1.bin", "carnival_1.bin"):  # no val in these
        write_raw_shard(tmp_path / name, range(3))
    found = open_shards(tmp_path)
    assert names_of(found.val) == ["carnival_1.bin"]
    assert names_of(found.train) == ["carnival_2.bin", "interval_1.bin"]


def test_a_lone_shard_is_left_to_be_split_and_a_lone_val_refused(tmp_path):
    path = write_raw_shard(tmp_path / "x.bin", range(3))
    assert open_shards(tmp_path).val == open_shards(path).val == []
    path.rename(tmp_path / "x_val.bin")
    refused(lambda: open_shards(tmp_path), "no training file", "x_val.bin")


def test_a_missing_shard_and_a_bad_description_are_refused(tmp_path):
    write_raw_shard(tmp_path / "a.bin", range(3))
    (tmp_path / "meta.json").write_text('{"shards": ["a.bin", "b.bin"], "vocab_size": 9}')
    refused(lambda: open_shards(tmp_path), "lacks the shard b.bin")
    for text in ("{", "[]", "{}", '{"shards": ["../a.bin"], "vocab_size": 9}'):
        (tmp_path / "meta.json").write_text(text)
        refused(lambda: open_shards(tmp_path), "meta.json")


def test_a_file_size_limit_is_a_sentence(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        blocks = [np.arange(1 << 15), np.arange(1 << 15)]
        refused(lambda: write_shard(tmp_path / "x.bin", blocks, "<u2"), "x.bin", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_written_files_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_shard(tmp_path / "x.bin", [np.arange(3)], "<u2")
    finally:
        os.umask(before)
    assert (tmp_path / "x.bin").stat().st_mode & 0o777 == 0o640


def test_a_folder_is_claimed_only_when_it_is_ours(tmp_path):
    out = tmp_path / "deep" / "out"
    with pytest.raises(RuntimeError), claimed_folder(out):
        raise RuntimeError("before anything was written")
    assert not out.exists()

    with pytest.raises(RuntimeError), claimed_folder(out):
        write_raw_shard(out / "x_train_000001.bin", range(3))
        raise RuntimeError("half way")
    refused(lambda: open_shards(out), "unfinished")
    with claimed_folder(out):
        assert not (out / "x_train_000001.bin").exists()  # the earlier attempt is gone
        with pytest.raises(InputError, match="another process"), claimed_folder(out):
            pass
        write_raw_shard(out / "x_train_000001.bin", range(3))
    assert names_of(open_shards(out).train) == ["x_train_000001.bin"]

    refused(lambda: claimed_folder(out).__enter__(), out, "not empty")
    refused(lambda: claimed_folder(out / "x_train_000001.bin").__enter__(), "is a file")
