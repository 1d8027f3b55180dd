"""`deeploop data` writes shards of the same corpus, and a killed run can be completed."""

import errno
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from deeploop.data.corpus import load_corpus
from deeploop.data.prepare import prepare
from deeploop.data.shards import write_shard
from deeploop.data.tokenizer import load_tokenizer
from tests.helpers.data import read_all, refused, write_jsonl

FORK = multiprocessing.get_context("fork")


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_prepared_shards_are_the_same_corpus(tmp_path, cache, bpe_dir, kind):
    spec = "byte" if kind == "byte" else f"gpt2:{bpe_dir}"
    path = write_jsonl(tmp_path / "a.jsonl", [f"the block runs {i} é " * 20 for i in range(90)])
    calls = []
    out = tmp_path / "out"
    meta = prepare(
        str(path), str(out), spec, shard_tokens=1000, progress=lambda *c: calls.append(c)
    )
    direct = load_corpus(str(path), spec, cache_dir=cache)
    again = load_corpus(str(out))
    for split in ("train", "val"):
        assert read_all(getattr(again, split)) == read_all(getattr(direct, split))
        assert meta["tokens"][split] == len(getattr(direct, split))
    assert again.bytes_per_token == direct.bytes_per_token
    assert again.tokenizer.encode("again é") == direct.tokenizer.encode("again é")
    assert again.vocab_size == direct.vocab_size
    assert meta["shards"][0] == "a_val_000000.bin"
    assert [int(name[-10:-4]) for name in meta["shards"]] == list(range(len(meta["shards"])))
    assert calls[-1] == ("write", sum(meta["tokens"].values()), sum(meta["tokens"].values()))
    extra = {"tokenizer.json"} if kind == "bpe" else set()
    assert {file.name for file in out.iterdir()} == {*meta["shards"], "meta.json"} | extra
    refused(lambda: prepare(str(path), str(out), spec), out, "not empty")


def test_shards_keep_working_without_their_tokenizer(tmp_path, bpe_dir):
    out = tmp_path / "out"
    prepare("", str(out), f"gpt2:{bpe_dir}")
    (out / "tokenizer.json").unlink()
    corpus = load_corpus(str(out))
    assert corpus.tokenizer is None and "tokenizer.json" in corpus.describe()
    assert load_corpus(str(out), f"gpt2:{bpe_dir}").tokenizer is not None
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "tokenizer.json"
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(other))
    refused(lambda: load_corpus(str(out), str(other)), "1 ids", "written with")


def test_a_flipped_bit_in_a_shard_is_noticed(tmp_path, monkeypatch):
    out = tmp_path / "out"
    meta = prepare("", str(out), "byte")
    shard = out / meta["shards"][1]
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    refused(lambda: load_corpus(str(out)), shard, "checksum")
    monkeypatch.setattr("deeploop.data.checksums.SMALL", 100)  # of larger ones on request alone
    load_corpus(str(out))
    refused(lambda: load_corpus(str(out), verify=True), shard, "checksum")
    data[5000] ^= 1
    shard.write_bytes(data)
    assert "checksums of 2 of 2 shards match" in load_corpus(str(out), verify=True).describe()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shards", "x"), ("shards", [1]), ("shards", []), ("vocab_size", 1e9), ("vocab_size", True),
        ("vocab_size", 1 << 40), ("tokenizer", 3), ("tokens", []), ("bytes", [1]), ("sha256", 1),
        ("bytes", {"val": -1}), ("bytes", {"val": "x"}), ("dropped_bytes", []),
    ],
)  # fmt: skip
def test_a_description_with_a_wrong_type_is_refused(tmp_path, field, value):
    write_shard(tmp_path / "a.bin", [np.arange(9)], "<u2")
    meta = {"shards": ["a.bin"], "vocab_size": 9, field: value}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    refused(lambda: load_corpus(str(tmp_path)), "meta.json")


def test_shards_refuse_another_tokenizer_of_the_same_size(tmp_path, bpe_dir):
    out = tmp_path / "out"
    prepare("", str(out), f"gpt2:{bpe_dir}")
    other = load_tokenizer(f"gpt2:{bpe_dir}").save(tmp_path)
    text = (
        (tmp_path / other)
        .read_text()
        .replace('"add_prefix_space": false', '"add_prefix_space": true')
    )
    (tmp_path / other).write_text(text)
    assert "true" in text
    refused(lambda: load_corpus(str(out), str(tmp_path / other)), "written with", "auto")
    refused(lambda: load_corpus(str(out), "byte"), "'byte' has 256", "auto")


def test_a_big_vocabulary_takes_32_bits(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(70_000)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "big.json"))
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in range(0, 70_000, 7)))
    out = tmp_path / "out"
    meta = prepare(str(tmp_path / "a.txt"), str(out), str(tmp_path / "big.json"))
    header = np.fromfile(out / meta["shards"][1], "<i4", 3)
    assert header.tolist() == [20240801, 7, 9000]
    corpus = load_corpus(str(out))
    assert read_all(corpus.train) + read_all(corpus.val) == list(range(0, 70_000, 7))


def die_while_writing(path, out):
    prepare(
        path, out, shard_tokens=500, progress=lambda phase, *_: phase == "write" and os._exit(9)
    )


def test_a_killed_preparation_is_taken_up(tmp_path):
    path = str(write_jsonl(tmp_path / "a.jsonl", ["some text " * 50] * 50))
    out = tmp_path / "out"
    child = FORK.Process(target=die_while_writing, args=(path, str(out)))
    child.start()
    child.join()
    assert child.exitcode == 9
    refused(lambda: load_corpus(str(out)), "unfinished")
    phases: list[str] = []
    meta = prepare(path, str(out), progress=lambda phase, *_: phases.append(phase))
    assert "tokenise" not in phases  # that part was done
    assert {file.name for file in out.iterdir()} == {*meta["shards"], "meta.json"}
    load_corpus(str(out))


def test_a_full_disk_is_a_sentence_and_can_be_taken_up(tmp_path, monkeypatch):
    path, out = str(write_jsonl(tmp_path / "a.jsonl", ["some text " * 50] * 50)), tmp_path / "out"
    real = os.fsync

    def full(handle):
        if "a_train_000002" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    refused(lambda: prepare(path, str(out), shard_tokens=4000), "a_train_000002.bin", "No space")
    assert [file.name for file in out.glob("*_000002*")] == []
    monkeypatch.undo()
    prepare(path, str(out), shard_tokens=4000)
    load_corpus(str(out))


def test_bad_preparations_are_refused_and_leave_nothing(tmp_path):
    out = str(tmp_path / "out")
    refused(lambda: prepare("", out, shard_tokens=0), "shard_tokens is 0")
    refused(lambda: prepare(str(tmp_path / "none"), out), "does not exist")
    refused(lambda: prepare("", out, "nonsense"), "nonsense")
    assert not Path(out).exists()
