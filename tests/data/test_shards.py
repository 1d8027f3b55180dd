"""Shards of every layout, damaged shards, streams over many of them, and safe writing."""

import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeploop.data.shards import (
    ArraySegment,
    FileSegment,
    TokenStream,
    claimed_folder,
    open_shard,
    open_shards,
    write_shard,
)
from deeploop.utils.disk import atomic_file
from deeploop.utils.errors import InputError

V1, V7 = (20240520, 1, "<u2"), (20240801, 7, "<u4")


def raw_shard(path: Path, tokens, magic=20240520, version=1, dtype="<u2", ntok=None) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if ntok is None else ntok
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def everything(segment) -> list[int]:
    return segment.read(0, len(segment)).tolist()


def refused(call, *words) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message


@pytest.mark.parametrize(("magic", "version", "dtype"), [V1, V7])
def test_llmc_layouts_are_read(tmp_path, magic, version, dtype):
    tokens = [0, 7, np.iinfo(dtype).max, 3]
    path = raw_shard(tmp_path / "x.bin", tokens, magic, version, dtype)
    assert everything(open_shard(path)) == tokens


def test_nanogpt_files_are_read_without_a_header(tmp_path):
    np.arange(5, dtype="<u2").tofile(tmp_path / "train.bin")
    assert everything(open_shard(tmp_path / "train.bin")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_what_is_written_has_the_public_layout(tmp_path, dtype):
    blocks = [np.arange(4), np.arange(0), np.arange(9)]
    path = tmp_path / "x.bin"
    assert write_shard(path, blocks, dtype) == 13
    magic, version, _ = V1 if dtype == "<u2" else V7
    expected = raw_shard(tmp_path / "y.bin", np.concatenate(blocks), magic, version, dtype)
    assert path.read_bytes() == expected.read_bytes()


def test_damaged_shards_are_refused_in_a_sentence(tmp_path):
    path = tmp_path / "x.bin"
    good = raw_shard(path, range(10)).read_bytes()

    def put(content: bytes):
        path.write_bytes(content)
        return lambda: open_shard(path)

    refused(put(b""), path, "empty")
    refused(put(good[:500]), path, "torn header", 500)
    refused(put(good[:-1]), path, "ntok 10", 19)
    refused(put(good[:-2]), path, "ntok 10", 18)
    refused(put(good + b"\0\0"), path, "ntok 10", 22)
    refused(put(good[4:]), path, "magic 1")
    refused(put(b"ab"), path, "magic None")
    refused(lambda: open_shard(raw_shard(path, range(3), version=2)), path, "version 2")
    refused(lambda: open_shard(raw_shard(path, range(3), ntok=-3)), path, "ntok -3")
    refused(lambda: open_shard(raw_shard(path, [])), path, "ntok 0")
    refused(lambda: open_shard(raw_shard(path, [1], *V1[:2], "<u4")), path, "ntok 1")
    (tmp_path / "val.bin").write_bytes(b"abc")
    refused(lambda: open_shard(tmp_path / "val.bin"), "3 bytes", "uint16")


def names_of(segments) -> list[str]:
    return [Path(segment.label).name for segment in segments]


def test_validation_shards_are_found_by_name(tmp_path):
    for name in ("fw_train_000001.bin", "fw_val_000000.bin", "fw_train_000002.bin"):
        raw_shard(tmp_path / name, range(3))
    found = open_shards(tmp_path)
    assert names_of(found.val) == ["fw_val_000000.bin"]
    assert names_of(found.train) == ["fw_train_000001.bin", "fw_train_000002.bin"]


def test_the_last_word_of_a_name_decides(tmp_path):
    for name in ("val_set_train_000001.bin", "VAL_set_VAL_000000.bin", "train_validation.bin"):
        raw_shard(tmp_path / name, range(3))
    assert names_of(open_shards(tmp_path).train) == ["val_set_train_000001.bin"]


def test_the_first_of_several_validates_where_no_name_says_so(tmp_path):
    for name in ("carnival_2.bin", "interval_1.bin", "carnival_1.bin"):  # no val in these
        raw_shard(tmp_path / name, range(3))
    found = open_shards(tmp_path)
    assert names_of(found.val) == ["carnival_1.bin"]
    assert names_of(found.train) == ["carnival_2.bin", "interval_1.bin"]


def test_a_lone_shard_is_left_to_be_split_and_a_lone_val_refused(tmp_path):
    path = raw_shard(tmp_path / "x.bin", range(3))
    assert open_shards(tmp_path).val == open_shards(path).val == []
    path.rename(tmp_path / "x_val.bin")
    refused(lambda: open_shards(tmp_path), "no training shard", "x_val.bin")


def test_a_missing_shard_and_a_bad_description_are_refused(tmp_path):
    raw_shard(tmp_path / "a.bin", range(3))
    (tmp_path / "meta.json").write_text('{"shards": ["a.bin", "b.bin"], "vocab_size": 9}')
    refused(lambda: open_shards(tmp_path), "lacks the shard b.bin")
    for text in ("{", "[]", "{}", '{"shards": ["../a.bin"], "vocab_size": 9}'):
        (tmp_path / "meta.json").write_text(text)
        refused(lambda: open_shards(tmp_path), "meta.json")


@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    want=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_stream_reads_like_one_array(lengths, cut, want):
    whole = np.arange(sum(lengths), dtype=np.uint16)
    parts = np.split(whole, np.cumsum(lengths)[:-1])
    stream = TokenStream([ArraySegment(str(i), p) for i, p in enumerate(parts)], 1 << 16)
    low, high = sorted(round(x * len(whole)) for x in cut)
    view, part = stream.view(low, high), whole[low:high]
    start, stop = sorted(round(x * len(part)) for x in want)
    got = view.read(start, stop - start)
    assert got.dtype == np.int64 and got.tolist() == part[start:stop].tolist()
    assert [t for block in view.blocks(3) for t in block] == part.tolist()


def test_reads_outside_the_stream_are_errors():
    stream = TokenStream([ArraySegment("a", np.arange(9, dtype=np.uint8))], 256).view(2, 6)
    for start, length in ((-1, 2), (3, 2), (0, 5), (0, -1)):
        with pytest.raises(IndexError):
            stream.read(start, length)
    with pytest.raises(IndexError):
        stream.view(0, 8)


def test_an_id_outside_the_vocabulary_is_named(tmp_path):
    raw_shard(tmp_path / "a.bin", [1] * 5)
    path = raw_shard(tmp_path / "b.bin", [2, 2, 2, 500, 2])
    stream = TokenStream([open_shard(tmp_path / "a.bin"), open_shard(path)], 500)
    assert stream.read(0, 8).tolist() == [1] * 5 + [2] * 3
    refused(lambda: stream.read(0, 9), path, "id 500", "offset 3", "vocab_size is 500")
    refused(stream.sample_check, path, "offset 3")


def test_the_sampled_check_reads_a_little_of_a_lot():
    class Counting(ArraySegment):
        total = 0

        def read(self, start, length):
            Counting.total += length
            return super().read(start, length)

    tokens = np.zeros(1 << 22, np.uint16)
    tokens[-1] = 999  # the ends are always looked at
    stream = TokenStream([Counting("a", tokens)], 256)
    refused(stream.sample_check, "id 999", f"offset {len(tokens) - 1}")
    assert Counting.total <= len(tokens) // 16


def test_more_shards_than_descriptors(tmp_path):
    paths = [raw_shard(tmp_path / f"{i:03d}.bin", [i, i, i]) for i in range(200)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        stream = TokenStream([open_shard(path) for path in paths], 256)
        assert stream.read(0, 600).tolist() == [i for i in range(200) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_shard_that_changes_under_a_run_is_a_sentence(tmp_path):
    shard = open_shard(raw_shard(tmp_path / "x.bin", range(100)))
    os.truncate(shard.label, 1024 + 2 * 60)
    assert shard.read(50, 10).tolist() == list(range(50, 60))
    refused(lambda: shard.read(50, 20), shard.label, "ends at token 60")
    os.unlink(shard.label)
    refused(lambda: shard.read(0, 1), shard.label, "no longer be read")


def test_a_corpus_larger_than_memory(tmp_path):
    """64 GiB of (sparse) tokens are opened, checked and sampled in a few MiB."""
    size = 1 << 36
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(size)
        file.seek(size - 2)
        file.write(np.uint16(41).tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    stream = TokenStream([open_shard(tmp_path / "train.bin")], 50257)
    assert len(stream) == size // 2
    stream.sample_check()
    for start in range(0, len(stream) - 1025, len(stream) // 500):
        stream.read(start, 1025)
    assert stream.read(len(stream) - 1, 1).tolist() == [41]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


def test_nothing_half_written_takes_the_name(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused(lambda: write_shard(path, [np.arange(3)], "<u2"), path, "No space left")
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_a_sentence(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        blocks = [np.arange(1 << 15), np.arange(1 << 15)]
        refused(lambda: write_shard(tmp_path / "x.bin", blocks, "<u2"), "x.bin", "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_other_errors_keep_their_traceback(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "none" / "x.bin"):
        pass


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
        raw_shard(out / "x_train_000001.bin", range(3))
        raise RuntimeError("half way")
    refused(lambda: open_shards(out), "unfinished")
    with claimed_folder(out):
        assert not (out / "x_train_000001.bin").exists()  # the earlier attempt is gone
        with pytest.raises(InputError, match="another process"), claimed_folder(out):
            pass
        raw_shard(out / "x_train_000001.bin", range(3))
    assert names_of(open_shards(out).train) == ["x_train_000001.bin"]

    refused(lambda: claimed_folder(out).__enter__(), out, "not empty")
    refused(lambda: claimed_folder(out / "x_train_000001.bin").__enter__(), "is a file")


def test_segments_compare_by_value():
    assert FileSegment("a", 0, "u1", 3) == FileSegment("a", 0, "u1", 3)
