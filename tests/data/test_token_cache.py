"""Text is tokenised once, also by processes that start together or are killed."""

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from deeploop.data.corpus import load_corpus
from deeploop.data.token_cache import default_cache
from tests.helpers.data import read_all, refused, write_jsonl

FORK = multiprocessing.get_context("fork")


def test_other_text_is_tokenised_once(tmp_path, cache, bpe_dir, monkeypatch):
    texts = [f"the block runs again {i}, é" * 40 for i in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    calls = []
    load = lambda: load_corpus(  # noqa: E731
        str(path), f"gpt2:{bpe_dir}", cache_dir=cache, progress=lambda *now: calls.append(now)
    )
    corpus = load()
    joined = corpus.tokenizer.decode(read_all(corpus.train) + read_all(corpus.val))
    assert joined == "".join("<|endoftext|>" + text for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert corpus.train_bytes + corpus.val_bytes == size
    assert corpus.bytes_per_token == pytest.approx(size * 0.1 / len(corpus.val), rel=0.02)
    assert calls and all(phase == "tokenise" and 0 < done <= total for phase, done, total in calls)
    calls.clear()
    assert read_all(load().val) == read_all(corpus.val) and not calls

    time.sleep(0.01)
    write_jsonl(path, texts[:-1])  # a changed source is another corpus
    assert len(load().train) < len(corpus.train) and calls


def write_like(path, content: bytes) -> None:
    """Write a file of the same size, and give it the time it had."""
    stat = path.stat()
    assert len(content) == stat.st_size
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_a_file_overwritten_with_equal_size_and_time_is_another_text(tmp_path, cache):
    path = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 9)
    before = load_corpus(str(path), cache_dir=cache)
    write_like(path, path.read_bytes().replace(b"some", b"SOME"))
    after = load_corpus(str(path), cache_dir=cache)
    assert bytes(read_all(before.train))[:9] == b"some text"
    assert bytes(read_all(after.train))[:9] == b"SOME text"


def test_a_moved_file_is_not_tokenised_again(tmp_path, cache):
    path = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 9)
    load_corpus(str(path), cache_dir=cache)
    built = []
    moved = path.rename(tmp_path / "b.jsonl")
    load_corpus(str(moved), cache_dir=cache, progress=lambda *now: built.append(now))
    assert not built


@pytest.mark.parametrize("name", ["tokens", "cache.json"])
def test_a_flipped_bit_in_the_cache_is_noticed(tmp_path, cache, name):
    path = str(write_jsonl(tmp_path / "a.jsonl", ["some text"] * 9))
    before = load_corpus(path, cache_dir=cache)
    want = read_all(before.train), before.train_bytes
    [folder] = [entry for entry in Path(cache).iterdir() if entry.is_dir()]
    data = (folder / name).read_bytes()
    digit = data.rindex(b"9") if name == "cache.json" else 20
    write_like(folder / name, data[:digit] + bytes([data[digit] ^ 1]) + data[digit + 1 :])
    again = load_corpus(path, cache_dir=cache)
    assert (read_all(again.train), again.train_bytes) == want


def test_large_text_is_sampled_and_compared_completely_on_request(tmp_path, cache, monkeypatch):
    monkeypatch.setattr("deeploop.data.checksums.SMALL", 100)
    monkeypatch.setattr("deeploop.data.checksums.SAMPLE", 4)
    path = write_jsonl(tmp_path / "a.jsonl", ["some text"] * 99)
    built = []

    def load(**options):
        built.clear()
        progress = lambda *now: built.append(now)  # noqa: E731
        return load_corpus(str(path), cache_dir=cache, progress=progress, **options)

    load()
    [tokens] = Path(cache).glob("*/tokens")
    good = tokens.read_bytes()
    write_like(tokens, good[:18] + b"X" + good[19:])
    assert read_all(load().train)[9] == ord("X") and not built
    assert read_all(load(verify=True).train)[9] != ord("X")
    content = path.read_bytes()
    write_like(path, content[:12] + b"X" + content[13:])
    load()
    assert not built  # between two samples
    load(verify=True)
    assert tokens.read_bytes() != good
    os.utime(path, ns=(1, 1))
    load()  # the time is in the key of large text
    assert len(list(Path(cache).glob("*/tokens"))) == 2


def test_text_that_changes_while_it_is_tokenised_is_refused(tmp_path, cache):
    path = write_jsonl(tmp_path / "a.jsonl", ["some text" * 99] * 99)
    change = lambda *_: write_like(path, path.read_bytes().replace(b"some", b"SOME"))  # noqa: E731
    refused(lambda: load_corpus(str(path), cache_dir=cache, progress=change), path, "changed while")


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"[" * 99999, b'{"facts": 1, "sha256": "x"}', b'{"facts": {}, "sha256": "x"}'],
)
def test_a_malformed_description_is_a_damaged_cache(tmp_path, cache, content):
    path = str(write_jsonl(tmp_path / "a.jsonl", ["some text"] * 9))
    before = load_corpus(path, cache_dir=cache)
    next(Path(cache).glob("*/cache.json")).write_bytes(content)
    assert read_all(load_corpus(path, cache_dir=cache).train) == read_all(before.train)


def test_each_tokenizer_and_field_has_its_own_cache(tmp_path, cache, bpe_dir):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "the block runs", "note": "again and again"}\n' * 9)

    def load(spec, field):
        corpus = load_corpus(str(path), spec, text_field=field, cache_dir=cache)
        return corpus.tokenizer.decode(read_all(corpus.train)).split()[0]

    got = [load(s, f) for s in ("byte", f"gpt2:{bpe_dir}") for f in ("text", "note", "text")]
    assert got[:3] == ["the", "again", "the"]
    assert got[3:] == ["<|endoftext|>the", "<|endoftext|>again", "<|endoftext|>the"]


@pytest.mark.parametrize("part", ["tokens", "cache.json", "both", "half the tokens"])
def test_a_cache_that_lost_a_part_is_built_again(tmp_path, cache, part):
    path = str(write_jsonl(tmp_path / "a.jsonl", ["some text " * 50] * 50))
    before = load_corpus(path, cache_dir=cache)
    [folder] = [entry for entry in Path(cache).iterdir() if entry.is_dir()]
    if part == "half the tokens":
        os.truncate(folder / "tokens", (folder / "tokens").stat().st_size // 2)
    for name in ("tokens", "cache.json"):
        if part in (name, "both"):
            (folder / name).unlink()
    built = []
    again = load_corpus(path, cache_dir=cache, progress=lambda *now: built.append(now))
    assert built and read_all(again.train) == read_all(before.train)
    assert read_all(again.val) == read_all(before.val)
    assert [entry for entry in Path(cache).iterdir() if entry.is_dir()] == [folder]


def test_a_cache_that_may_not_be_read_is_refused(tmp_path, cache, monkeypatch):
    path = str(write_jsonl(tmp_path / "a.jsonl", ["some text " * 50] * 50))
    load_corpus(path, cache_dir=cache)

    real = os.open

    def denied(name, *rest):
        if str(name).endswith("cache.json"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(name, *rest)

    monkeypatch.setattr(os, "open", denied)
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
    answers.put((read_all(corpus.train), read_all(corpus.val), bool(built)))


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
