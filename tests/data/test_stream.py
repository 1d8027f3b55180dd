"""A stream over many segments reads like one array, and checks every id."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeploop.data.shards import open_shard
from deeploop.data.stream import ArraySegment, FileSegment, TokenStream
from tests.helpers.data import refused, write_raw_shard


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
    write_raw_shard(tmp_path / "a.bin", [1] * 5)
    path = write_raw_shard(tmp_path / "b.bin", [2, 2, 2, 500, 2])
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
    paths = [write_raw_shard(tmp_path / f"{i:03d}.bin", [i, i, i]) for i in range(200)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        stream = TokenStream([open_shard(path) for path in paths], 256)
        assert stream.read(0, 600).tolist() == [i for i in range(200) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_shard_that_changes_under_a_run_is_a_sentence(tmp_path):
    shard = open_shard(write_raw_shard(tmp_path / "x.bin", range(100)))
    os.truncate(shard.label, 1024 + 2 * 60)
    assert shard.read(50, 10).tolist() == list(range(50, 60))
    refused(lambda: shard.read(50, 20), shard.label, "ends at token 60")
    os.unlink(shard.label)
    refused(lambda: shard.read(0, 1), shard.label, "cannot be read")


@pytest.mark.parametrize("whole", [True, False])
def test_tokens_swapped_under_a_run_are_noticed(tmp_path, whole):
    path = write_raw_shard(tmp_path / "x.bin", range(100))
    shard = open_shard(path)
    shard.remember(whole)
    os.utime(path, ns=(1, 1))
    assert shard.read(0, 3).tolist() == [0, 1, 2]  # touched, with the same tokens
    stat = path.stat()
    write_raw_shard(tmp_path / "y.bin", range(100, 200)).rename(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    refused(lambda: shard.read(0, 3), path, "other content", "checkpoint")
    write_raw_shard(path, range(100))
    assert shard.read(50, 1).tolist() == [50]
    path.unlink()
    os.mkfifo(path)
    refused(lambda: shard.read(0, 3), path, "named pipe")


def test_the_hash_of_a_stream_sees_every_token():
    tokens = np.arange(3000) % 256
    whole = TokenStream([ArraySegment("a", tokens.astype(np.uint8))], 256)
    halves = [ArraySegment("b", half) for half in np.split(tokens.astype(np.uint16), 2)]
    assert whole.content() == TokenStream(halves, 256).content()
    tokens[1234] ^= 1
    assert whole.content() != TokenStream([ArraySegment("c", tokens.astype("<u2"))], 256).content()


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


def test_segments_compare_by_value():
    assert FileSegment("a", 0, "u1", 3) == FileSegment("a", 0, "u1", 3)
