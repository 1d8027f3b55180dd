"""Tokenizers round-trip any text, and refuse in a sentence what they cannot load."""

import builtins
import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeploop.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.helpers.data import refused, train_bpe

tokenizers = pytest.importorskip("tokenizers")
PROSE = "A looped model runs the same block again, and again; isn't that odd?\n\n  Indeed  it is. "
ODD = [
    "",
    " ",
    "\n\n\n",
    "é",
    "日本語",
    "👩\u200d👩\u200d👧",
    "\0",
    "e\u0301",
    "\r\n\t",
    "\ufeffx",
    "﷽" * 3,
]


@pytest.fixture(scope="module")
def gpt2_dir(tmp_path_factory):
    """A small byte-level BPE in GPT-2's two files, its end-of-text token included."""
    return train_bpe(tmp_path_factory.mktemp("gpt2"), PROSE * 20, 400)


@pytest.fixture(scope="module")
def bpe(gpt2_dir):
    return load_tokenizer(f"gpt2:{gpt2_dir}")


def refused_spec(spec: str, *words: object) -> None:
    refused(lambda: load_tokenizer(spec), *words)


@pytest.mark.parametrize("text", [*ODD, PROSE, "<|endoftext|> is quoted"])
def test_odd_text_survives(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert [row.ids.tolist() for row in tokenizer.encode_batch([text, text])] == [ids, ids]


@given(st.text())
def test_any_text_survives(text):
    for tokenizer in (ByteTokenizer(), load_tokenizer("byte")):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decoding_never_raises(bpe):
    byte = ByteTokenizer()
    assert byte.decode([0xE6, 0x97]) == "\ufffd"  # a character cut short
    assert byte.decode([65, 300, -1, 66]) == "A\ufffd\ufffdB"
    half = bpe.encode("日")[:1]
    assert bpe.decode(half) == "\ufffd"
    assert bpe.decode([*bpe.encode("A"), 10**6, -1, *bpe.encode("B")]) == "A\ufffd\ufffdB"
    assert bpe.decode(np.array(bpe.encode("AB"))) == "AB"


@given(text=st.text())
def test_bytes_of_ids_add_up_to_the_text(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        lengths = tokenizer.byte_lengths()
        assert len(lengths) == tokenizer.vocab_size
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_special_tokens_stand_for_no_bytes(bpe, tmp_path):
    assert bpe.byte_lengths()[bpe.eot] == 0
    bpe.save(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_tokens(["größer"])
    inner.add_special_tokens(["<|turn|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    more = load_tokenizer(str(tmp_path))
    assert more.byte_lengths()[bpe.vocab_size :].tolist() == [len("größer".encode()), 0]


def test_bytes_of_ids_are_unknown_where_decoding_adds_spaces(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    inner.save(str(tmp_path / "words.json"))
    assert load_tokenizer(str(tmp_path / "words.json")).byte_lengths() is None


def test_lone_surrogates_become_replacement_characters(bpe):
    text = json.loads('"a\\ud800b"')
    for tokenizer in (ByteTokenizer(), bpe):
        assert tokenizer.decode(tokenizer.encode(text)) == "a\ufffdb"


def test_special_tokens_in_text_are_text(bpe):
    assert bpe.eot == 0
    assert bpe.eot not in bpe.encode("<|endoftext|>")
    assert bpe.decode([bpe.eot]) == "<|endoftext|>"


def test_every_way_to_name_the_same_files(bpe, gpt2_dir, tmp_path, monkeypatch):
    byname = load_tokenizer(f"gpt2:{gpt2_dir / 'vocab.json'}, {gpt2_dir / 'merges.txt'}")
    saved = load_tokenizer(bpe.save(tmp_path), tmp_path)
    again = load_tokenizer(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    relative = load_tokenizer("tokenizer.json")
    for other in (byname, saved, again, relative, load_tokenizer(bpe.spec)):
        assert other.encode(PROSE) == bpe.encode(PROSE)
        assert (other.eot, other.vocab_size) == (bpe.eot, bpe.vocab_size)
        assert other.fingerprint == bpe.fingerprint
    monkeypatch.chdir("/")
    assert load_tokenizer(relative.spec).encode(PROSE) == bpe.encode(PROSE)


def test_the_vocabulary_reaches_the_highest_id(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a"))
    inner.save(str(tmp_path / "holes.json"))
    assert load_tokenizer(str(tmp_path / "holes.json")).vocab_size == 10


def test_what_cannot_be_loaded_is_refused_in_a_sentence(tmp_path):
    refused_spec("nonsense", "'nonsense'", "gpt2:DIR", "tokenizer.json")
    refused_spec(f"gpt2:{tmp_path}", tmp_path / "vocab.json")
    refused_spec("gpt2:a.json,b.txt", "a.json")
    (tmp_path / "bad.json").write_text("{\n")
    refused_spec(str(tmp_path / "bad.json"), "bad.json", "could not be read")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.save(str(tmp_path / "empty.json"))
    refused_spec(str(tmp_path / "empty.json"), "empty vocabulary")


def test_words_without_an_unknown_token_are_a_sentence(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "words.json"))
    words = load_tokenizer(str(tmp_path / "words.json"))
    for encode in (words.encode, lambda text: words.encode_batch([text])):
        refused(lambda encode=encode: encode("a b"), "words.json", "cannot encode", "unknown token")


BPE = {"type": "BPE", "vocab": {"a": 0}, "merges": []}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\xff", b"[]", b"{}", b"[" * 99999, b'{"model": 1}',
        json.dumps({"model": {**BPE, "vocab": {"a": 1 << 31}}}).encode(),
        json.dumps({"model": {**BPE, "merges": ["a b"]}}).encode(),
        json.dumps({"model": {"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}}).encode(),
        json.dumps({"model": BPE, "pre_tokenizer": {"type": "Sequence"}}).encode(),
    ],
)  # fmt: skip
def test_malformed_files_are_a_sentence(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    refused_spec(str(tmp_path / "x.json"), "x.json")
    (tmp_path / "vocab.json").write_bytes(content)
    (tmp_path / "merges.txt").write_bytes(b"a\n")
    refused_spec(f"gpt2:{tmp_path}", str(tmp_path))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name in ("tokenizers", "tiktoken"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    refused_spec("gpt2", "tiktoken", "pip install 'deeploop[data]'")
    refused_spec(str(tmp_path), "tokenizers", "pip install 'deeploop[data]'")


def fake_tiktoken(get_encoding):
    return type("Module", (), {"get_encoding": staticmethod(get_encoding)})


def test_no_network_says_how_to_give_local_files(monkeypatch):
    def offline(name):
        raise ConnectionError("a long story\nin many lines")

    monkeypatch.setitem(sys.modules, "tiktoken", fake_tiktoken(offline))
    refused_spec("gpt2", "ConnectionError", "gpt2:DIR", "vocab.json", "merges.txt")


def test_gpt2_by_tiktoken(monkeypatch):
    """The adapter, on a real tiktoken encoding of 256 bytes and one special token."""
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=r" ?\w+|\s+|[^\w\s]+",
        mergeable_ranks={bytes([i]): i for i in range(256)},
        special_tokens={"<|endoftext|>": 256},
    )
    monkeypatch.setitem(sys.modules, "tiktoken", fake_tiktoken(lambda name: encoding))
    tokenizer = load_tokenizer("gpt2")
    assert (tokenizer.vocab_size, tokenizer.eot) == (257, 256)
    for text in [*ODD, PROSE, "<|endoftext|>"]:
        assert tokenizer.encode(text) == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0xE6, 0x97, 65, 999, 256]) == "\ufffdA\ufffd<|endoftext|>"
    assert tokenizer.byte_lengths().tolist() == [1] * 256 + [0]
