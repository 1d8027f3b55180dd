"""Tokenizers round-trip any text; the streaming encoder gives the tokens of the whole."""

import builtins
import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeploop.errors import InputError
from deeploop.tokenizer import (
    ByteTokenizer,
    Piece,
    cut,
    encode_pieces,
    load_tokenizer,
    read_pieces,
    split_text,
    text_files,
)

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
    folder = tmp_path_factory.mktemp("gpt2")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [PROSE * 20], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False
    )
    trained.save_model(str(folder))
    return folder


@pytest.fixture(scope="module")
def bpe(gpt2_dir):
    return load_tokenizer(f"gpt2:{gpt2_dir}")


def refused(spec: str, *words: object) -> None:
    with pytest.raises(InputError) as caught:
        load_tokenizer(spec)
    assert "\n" not in str(caught.value)
    for word in words:
        assert str(word) in str(caught.value)


@pytest.mark.parametrize("text", [*ODD, PROSE, "<|endoftext|> is quoted"])
def test_odd_text_survives(bpe, text):
    for tokenizer in (ByteTokenizer(), bpe):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.vocab_size for i in ids)
        assert [row.tolist() for row in tokenizer.encode_batch([text, text])] == [ids, ids]


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
    refused("nonsense", "'nonsense'", "gpt2:DIR", "tokenizer.json")
    refused(f"gpt2:{tmp_path}", tmp_path / "vocab.json")
    refused("gpt2:a.json,b.txt", "a.json")
    (tmp_path / "bad.json").write_text("{\n")
    refused(str(tmp_path / "bad.json"), "bad.json", "could not be read")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.save(str(tmp_path / "empty.json"))
    refused(str(tmp_path / "empty.json"), "empty vocabulary")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name in ("tokenizers", "tiktoken"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    refused("gpt2", "tiktoken", "pip install 'deeploop[data]'")
    refused(str(tmp_path), "tokenizers", "pip install 'deeploop[data]'")


def fake_tiktoken(get_encoding):
    return type("Module", (), {"get_encoding": staticmethod(get_encoding)})


def test_no_network_says_how_to_give_local_files(monkeypatch):
    def offline(name):
        raise ConnectionError("a long story\nin many lines")

    monkeypatch.setitem(sys.modules, "tiktoken", fake_tiktoken(offline))
    refused("gpt2", "ConnectionError", "gpt2:DIR", "vocab.json", "merges.txt")


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


@given(st.data(), st.text(st.sampled_from("ab \n é"), max_size=300))
def test_pieces_do_not_depend_on_how_the_text_is_buffered(data, text):
    whole = list(split_text([text], size=10, reach=20))
    assert "".join(whole) == text
    assert all(0 < len(piece) <= 30 for piece in whole)
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    assert list(split_text(chunks, size=10, reach=20)) == whole


def test_endless_text_needs_bounded_memory():
    for text in ("x" * 1000, "a b c " * 200):
        pieces = list(itertools.islice(split_text(itertools.repeat(text)), 50))
        assert all(4096 <= len(piece) <= 4096 + (1 << 16) for piece in pieces)
    endless = (Piece(str(i), True, i) for i in itertools.count())
    got = list(itertools.islice(encode_pieces(ByteTokenizer(), endless, batch=100), 500))
    assert [position for _, _, position in got] == list(range(500))


def test_a_cut_stands_before_a_single_space():
    assert cut("abcd ef", 0, size=2, reach=9) == 4
    assert cut("ab  cd ef", 0, size=2, reach=9) == 6  # a run of spaces is one token's business
    assert cut("ab\n cd ef", 0, size=2, reach=9) == 6
    assert cut("abcdefgh", 0, size=2, reach=3) == 5


@settings(max_examples=50)
@given(st.text(st.sampled_from("ab, .'st\n  é1"), max_size=400))
def test_pieces_encode_to_the_tokens_of_the_whole(bpe, text):
    pieces = list(split_text([text], size=16, reach=1000))
    joined = [i for row in bpe.encode_batch(pieces) for i in row.tolist()]
    assert joined == bpe.encode(text)


def test_documents_are_told_apart(bpe):
    pieces = [Piece("one", True, 1), Piece(" more", False, 2), Piece("", True, 3)]
    pieces.append(Piece("two", True, 4))
    for batch in (1, 100):
        got = list(encode_pieces(bpe, pieces, batch))
        ids = [i for row, _, _ in got for i in row.tolist()]
        assert bpe.decode(ids) == "<|endoftext|>one more<|endoftext|><|endoftext|>two"
        assert [size for _, size, _ in got] == [3, 5, 0, 3]
        got = list(encode_pieces(ByteTokenizer(), pieces, batch))
        assert b"".join(bytes(row.tolist()) for row, _, _ in got) == b"one more\n\n\n\ntwo"
        assert sum(size for _, size, _ in got) == len("one more\n\n\n\ntwo")


def documents(path, field="text") -> list[str]:
    found: list[str] = []
    for piece in read_pieces(text_files(path), field):
        if piece.starts:
            found.append("")
        found[-1] += piece.text
    return found


def test_every_reader_gives_the_same_documents(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    texts = ["one", "zwei é", "x " * 9000, "\r\nlast\n"]
    with open(tmp_path / "a.jsonl", "w") as file:
        file.writelines(json.dumps({"body": text, "n": 1}) + "\n\n" for text in texts)
    pq.write_table(pa.table({"body": [*texts, None]}), tmp_path / "b.parquet", row_group_size=2)
    (tmp_path / "c.txt").write_bytes(texts[-1].encode())
    assert documents(tmp_path / "a.jsonl", "body") == texts
    assert documents(tmp_path / "b.parquet", "body") == texts
    assert documents(tmp_path / "c.txt") == texts[-1:]
    assert documents(tmp_path, "body") == texts * 2 + texts[-1:]
    positions = [piece.position for piece in read_pieces(text_files(tmp_path), "body")]
    assert positions == sorted(positions)
    assert positions[-1] == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_files_that_are_not_what_they_say(tmp_path, monkeypatch):
    def bad(name: str, content: bytes, *words: object) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            documents(path)
        assert "\n" not in str(caught.value)
        for word in (path, *words):
            assert str(word) in str(caught.value)

    bad("a.csv", b"x", ".jsonl", ".parquet", ".bin")
    bad("a.txt", b"abc\xff", "not UTF-8")
    bad("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2", "not JSON")
    bad("a.jsonl", b'{"body": "x"}\n', "line 1", "'text'", "body", "text_field")
    bad("a.jsonl", b"[1]\n", "line 1", "list")
    monkeypatch.setattr("deeploop.tokenizer.MAX_LINE", 16)
    bad("a.jsonl", b'{"text": "%s"}\n' % (b"x" * 99), "line 1", "longer than 16")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    bad("a.parquet", b"PAR1 and then nothing", "parquet")
    for column, words in ({"body": ["x"]}, ("no column 'text'", "body")), ({"text": [1]}, "int64"):
        pq.write_table(pa.table(column), tmp_path / "b.parquet")
        bad("a.parquet", (tmp_path / "b.parquet").read_bytes(), *words)
