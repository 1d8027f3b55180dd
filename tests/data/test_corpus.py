"""Corpora, their caches and preparation."""

import errno
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest

from deeploop.data.corpus import load_corpus
from deeploop.data.ngrams import ngram_bits
from deeploop.data.prepare import prepare
from deeploop.data.shards import TokenStream, write_shard
from deeploop.data.token_cache import default_cache
from deeploop.data.tokenizer import load_tokenizer
from deeploop.utils.errors import InputError

FORK = multiprocessing.get_context("fork")


def everything(stream: TokenStream) -> list[int]:
    return stream.read(0, len(stream)).tolist()


def refused(call, *words: object) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    for word in words:
        assert str(word) in str(caught.value)


def write_jsonl(path: Path, texts) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def cache(tmp_path) -> str:
    return str(tmp_path / "cache")


@pytest.fixture(scope="module")
def bpe_dir(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        ["the block runs again " * 50], 300, special_tokens=["<|endoftext|>"], show_progress=False
    )
    trained.save_model(str(folder))
    return folder


# Corpora on disk


def test_default_corpus_is_real_text():
    corpus = load_corpus("")
    assert corpus.vocab_size == 256 and corpus.bytes_per_token == 1
    total = len(corpus.train) + len(corpus.val)
    assert total > 400_000 and len(corpus.val) == total // 10
    text = corpus.tokenizer.decode(corpus.train.read(0, 2000))
    assert text.startswith('The "assert" statement')
    assert "help topics" in corpus.describe() and "\n" not in corpus.describe()
    unigram, bigram = ngram_bits(corpus.train, corpus.val, 256)
    assert 4.6 < unigram < 4.8 and 3.3 < bigram < 3.5


def test_text_is_its_own_shard(tmp_path, cache):
    content = "line é\r\nand more\n".encode() * 50
    (tmp_path / "a.txt").write_bytes(content)
    corpus = load_corpus(str(tmp_path / "a.txt"), cache_dir=cache, val_fraction=0.25)
    assert bytes(everything(corpus.train) + everything(corpus.val)) == content
    assert len(corpus.val) == len(content) // 4 and corpus.bytes_per_token == 1
    assert not Path(cache).exists()  # nothing was copied


def test_other_text_is_tokenised_once(tmp_path, cache, bpe_dir, monkeypatch):
    texts = [f"the block runs again {i}, é" * 40 for i in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    calls = []
    load = lambda: load_corpus(  # noqa: E731
        str(path), f"gpt2:{bpe_dir}", cache_dir=cache, progress=lambda *now: calls.append(now)
    )
    corpus = load()
    joined = corpus.tokenizer.decode(everything(corpus.train) + everything(corpus.val))
    assert joined == "".join("<|endoftext|>" + text for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert corpus.train_bytes + corpus.val_bytes == size
    assert corpus.bytes_per_token == pytest.approx(size * 0.1 / len(corpus.val), rel=0.02)
    assert calls and all(phase == "tokenise" and 0 < done <= total for phase, done, total in calls)
    calls.clear()
    assert everything(load().val) == everything(corpus.val) and not calls

    time.sleep(0.01)
    write_jsonl(path, texts[:-1])  # a changed source is another corpus
    assert len(load().train) < len(corpus.train) and calls


def test_each_tokenizer_and_field_has_its_own_cache(tmp_path, cache, bpe_dir):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "the block runs", "note": "again and again"}\n' * 9)

    def load(spec, field):
        corpus = load_corpus(str(path), spec, text_field=field, cache_dir=cache)
        return corpus.tokenizer.decode(everything(corpus.train)).split()[0]

    got = [load(s, f) for s in ("byte", f"gpt2:{bpe_dir}") for f in ("text", "note", "text")]
    assert got[:3] == ["the", "again", "the"]
    assert got[3:] == ["<|endoftext|>the", "<|endoftext|>again", "<|endoftext|>the"]


@pytest.mark.parametrize("part", ["tokens", "marks.npy", "both", "half the tokens"])
def test_a_cache_that_lost_a_part_is_built_again(tmp_path, cache, part):
    path = str(write_jsonl(tmp_path / "a.jsonl", ["some text " * 50] * 50))
    before = load_corpus(path, cache_dir=cache)
    [folder] = [entry for entry in Path(cache).iterdir() if entry.is_dir()]
    if part == "half the tokens":
        os.truncate(folder / "tokens", (folder / "tokens").stat().st_size // 2)
    for name in ("tokens", "marks.npy"):
        if part in (name, "both"):
            (folder / name).unlink()
    built = []
    again = load_corpus(path, cache_dir=cache, progress=lambda *now: built.append(now))
    assert built and everything(again.train) == everything(before.train)
    assert everything(again.val) == everything(before.val)
    assert [entry for entry in Path(cache).iterdir() if entry.is_dir()] == [folder]


def test_a_cache_that_may_not_be_read_is_refused(tmp_path, cache, monkeypatch):
    path = str(write_jsonl(tmp_path / "a.jsonl", ["some text " * 50] * 50))
    load_corpus(path, cache_dir=cache)

    def denied(*_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(np, "load", denied)
    refused(lambda: load_corpus(path, cache_dir=cache), cache, "Permission denied")


def test_the_cache_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "deeploop"
    load_corpus(str(write_jsonl(tmp_path / "a.jsonl", ["some text"] * 9)))
    assert any((tmp_path / "xdg" / "deeploop").iterdir())


def load_in_child(path, cache, barrier, answers):
    built = []
    barrier.wait()
    corpus = load_corpus(path, cache_dir=cache, progress=lambda *now: built.append(now))
    answers.put((everything(corpus.train), everything(corpus.val), bool(built)))


@pytest.mark.parametrize("locks", [True, False])
def test_processes_may_build_one_cache_together(tmp_path, cache, locks, monkeypatch):
    if not locks:  # as on a file system without them
        fcntl = pytest.importorskip("fcntl")
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(37, "none")))
    path = str(write_jsonl(tmp_path / "a.jsonl", [f"text {i} " * 30 for i in range(800)]))
    barrier, answers = FORK.Barrier(3), FORK.Queue()
    children = [
        FORK.Process(target=load_in_child, args=(path, cache, barrier, answers)) for _ in range(3)
    ]
    for child in children:
        child.start()
    results = [answers.get(timeout=20) for _ in children]
    for child in children:
        child.join()
    assert results[0][:2] == results[1][:2] == results[2][:2]
    if locks:  # the others waited for the first
        assert sum(built for _, _, built in results) == 1
    left = [entry.name for entry in Path(cache).iterdir() if entry.is_dir()]
    assert len(left) == 1 and not left[0].endswith(".tmp")


def die_while_tokenising(path, cache):
    load_corpus(path, cache_dir=cache, progress=lambda *_: os._exit(9))


def test_a_killed_build_leaves_no_cache_and_is_cleaned_up(tmp_path, cache):
    path = str(write_jsonl(tmp_path / "a.jsonl", ["some text " * 50] * 50))
    child = FORK.Process(target=die_while_tokenising, args=(path, cache))
    child.start()
    child.join()
    assert child.exitcode == 9
    assert [entry.name[-4:] for entry in Path(cache).iterdir() if entry.is_dir()] == [".tmp"]
    assert len(load_corpus(path, cache_dir=cache).val)
    assert len([entry for entry in Path(cache).iterdir() if entry.is_dir()]) == 1


def test_shards_without_a_description(tmp_path, bpe_dir):
    write_shard(tmp_path / "x_val_0.bin", [np.arange(100)], "<u2")
    write_shard(tmp_path / "x_train_1.bin", [np.arange(200)], "<u2")
    corpus = load_corpus(str(tmp_path))
    assert (len(corpus.train), len(corpus.val), corpus.vocab_size) == (200, 100, 50257)
    assert corpus.tokenizer is None and corpus.bytes_per_token is None
    assert "assumed" in corpus.describe()
    assert load_corpus(str(tmp_path), vocab_size=200).vocab_size == 200
    refused(lambda: load_corpus(str(tmp_path), vocab_size=199), "x_train_1.bin", "id 199")
    named = load_corpus(str(tmp_path), f"gpt2:{bpe_dir}")
    assert named.tokenizer.vocab_size == named.vocab_size
    alone = load_corpus(str(tmp_path / "x_train_1.bin"), val_fraction=0.25)
    assert everything(alone.train) + everything(alone.val) == list(range(200))
    assert len(alone.val) == 50


def test_bytes_of_shards_that_do_not_say_are_counted(tmp_path, bpe_dir, monkeypatch):
    spec = f"gpt2:{bpe_dir}"
    path = write_jsonl(tmp_path / "a.jsonl", [f"the block runs {i} é " * 20 for i in range(90)])
    prepare(str(path), str(tmp_path / "out"), spec)
    (tmp_path / "out" / "meta.json").unlink()
    corpus = load_corpus(str(tmp_path / "out"), spec)
    text = corpus.tokenizer.decode(everything(corpus.val)).replace("<|endoftext|>", "")
    assert corpus.val_bytes == len(text.encode())
    assert load_corpus(str(tmp_path / "out"), spec, vocab_size=320).val_bytes == corpus.val_bytes
    monkeypatch.setattr("deeploop.data.corpus.COUNTED", len(corpus.val) // 2)
    guess = load_corpus(str(tmp_path / "out"), spec).val_bytes
    assert guess != corpus.val_bytes and guess == pytest.approx(corpus.val_bytes, rel=0.1)


def test_a_model_may_have_more_rows_than_the_tokenizer_has_ids(tmp_path):
    corpus = load_corpus("", vocab_size=320)
    assert corpus.vocab_size == corpus.train.vocab_size == 320
    refused(lambda: load_corpus("", vocab_size=255), "vocab_size is 255", 256)


def test_what_is_no_corpus_is_refused_in_a_sentence(tmp_path, cache):
    refused(lambda: load_corpus(str(tmp_path / "none")), "none", "does not exist")
    refused(lambda: load_corpus("", val_fraction=1.0), "val_fraction is 1.0")
    refused(lambda: load_corpus(str(tmp_path)), tmp_path, ".jsonl")
    for name, content in (("a.txt", "x"), ("b.txt", ""), ("c.jsonl", "\n"), ("d.jsonl", "")):
        (tmp_path / name).write_text(content)
        refused(lambda n=name: load_corpus(str(tmp_path / n), cache_dir=cache), name)
    (tmp_path / "file").write_text("")
    (tmp_path / "e.jsonl").write_text('{"text": "x"}')
    refused(
        lambda: load_corpus(str(tmp_path / "e.jsonl"), cache_dir=str(tmp_path / "file")),
        "cache folder",
        tmp_path / "file",
    )


# Preparation


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
        assert everything(getattr(again, split)) == everything(getattr(direct, split))
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
    assert everything(corpus.train) + everything(corpus.val) == list(range(0, 70_000, 7))


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
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == 4:  # after the staged tokens, val and one of train
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


def test_shards_train_where_the_presets_gpt2_tokenizer_cannot_be_had(tmp_path, monkeypatch):
    """A preset names GPT-2's; ready tokens need none, and a note says that there is none."""
    out = tmp_path / "shards"
    prepare("", str(out), "byte")

    def refuse(spec, folder=None):
        if spec == "gpt2":
            raise InputError("tokenizer 'gpt2' could not be fetched")
        return load_tokenizer(spec, folder)

    monkeypatch.setattr("deeploop.data.corpus.load_tokenizer", refuse)
    assert load_corpus(str(out), "gpt2").tokenizer.name == "byte"
    (out / "meta.json").unlink()
    corpus = load_corpus(str(out), "gpt2")
    assert corpus.tokenizer is None and "could not be fetched" in corpus.note
