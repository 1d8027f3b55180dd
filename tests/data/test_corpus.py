"""Text, shards and the default corpus are opened as two streams, or refused in a sentence."""

from pathlib import Path

import numpy as np
import pytest

from deeploop.data.corpus import load_corpus
from deeploop.data.ngrams import ngram_bits
from deeploop.data.prepare import prepare
from deeploop.data.shards import write_shard
from deeploop.data.tokenizer import load_tokenizer
from deeploop.utils.errors import InputError
from tests.helpers.data import read_all, refused, write_jsonl


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
    assert bytes(read_all(corpus.train) + read_all(corpus.val)) == content
    assert len(corpus.val) == len(content) // 4 and corpus.bytes_per_token == 1
    assert not Path(cache).exists()  # nothing was copied


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
    assert read_all(alone.train) + read_all(alone.val) == list(range(200))
    assert len(alone.val) == 50


def test_bytes_of_shards_that_do_not_say_are_counted(tmp_path, bpe_dir, monkeypatch):
    spec = f"gpt2:{bpe_dir}"
    path = write_jsonl(tmp_path / "a.jsonl", [f"the block runs {i} é " * 20 for i in range(90)])
    prepare(str(path), str(tmp_path / "out"), spec)
    (tmp_path / "out" / "meta.json").unlink()
    corpus = load_corpus(str(tmp_path / "out"), spec)
    text = corpus.tokenizer.decode(read_all(corpus.val)).replace("<|endoftext|>", "")
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


def test_shards_train_where_the_presets_gpt2_tokenizer_cannot_be_had(tmp_path, monkeypatch):
    """A preset names GPT-2's; ready tokens need none, and a note says that there is none."""
    out = tmp_path / "shards"
    prepare("", str(out), "byte")

    def refuse(spec, folder=None):
        if spec == "gpt2":
            raise InputError("tokenizer 'gpt2' could not be fetched")
        return load_tokenizer(spec, folder)

    monkeypatch.setattr("deeploop.data.shard_tokenizer.load_tokenizer", refuse)
    # With a network these are refused too: no other tokenizer takes the place of the one asked for.
    refused(lambda: load_corpus(str(out), "gpt2"), "could not be fetched")
    (out / "meta.json").unlink()
    corpus = load_corpus(str(out), "gpt2")
    assert corpus.tokenizer is None and "could not be fetched" in corpus.note
