"""Every reader gives the same documents; the streaming encoder, the tokens of the whole."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeploop.data.text import (
    TextSpan,
    encode_spans,
    read_spans,
    span_end,
    split_text,
    text_files,
)
from deeploop.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.helpers.data import refused, train_bpe


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A small byte-level BPE with an end-of-text token."""
    text = "the block runs again, and again; isn't that odd?\n\n  Indeed  it is. " * 20
    return load_tokenizer(f"gpt2:{train_bpe(tmp_path_factory.mktemp('bpe'), text, 400)}")


@given(st.data(), st.text(st.sampled_from("ab \n é"), max_size=300))
def test_spans_do_not_depend_on_how_the_text_is_buffered(data, text):
    whole = list(split_text([text], size=10, reach=20))
    assert "".join(whole) == text
    assert all(0 < len(span) <= 30 for span in whole)
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    assert list(split_text(chunks, size=10, reach=20)) == whole


def test_endless_text_needs_bounded_memory():
    for text in ("x" * 1000, "a b c " * 200):
        spans = list(itertools.islice(split_text(itertools.repeat(text)), 50))
        assert all(4096 <= len(span) <= 4096 + (1 << 16) for span in spans)
    endless = (TextSpan(str(i), True, i) for i in itertools.count())
    got = list(itertools.islice(encode_spans(ByteTokenizer(), endless, batch=100), 500))
    assert [position for _, _, position in got] == list(range(500))


def test_a_span_ends_before_a_single_space():
    assert span_end("abcd ef", 0, size=2, reach=9) == 4
    assert span_end("ab  cd ef", 0, size=2, reach=9) == 6  # a run of spaces may be one token
    assert span_end("ab\n cd ef", 0, size=2, reach=9) == 6
    assert span_end("abcdefgh", 0, size=2, reach=3) == 5


@settings(max_examples=50)
@given(st.text(st.sampled_from("ab, .'st\n  é1"), max_size=400))
def test_spans_encode_to_the_tokens_of_the_whole(bpe, text):
    spans = list(split_text([text], size=16, reach=1000))
    joined = [i for row in bpe.encode_batch(spans) for i in row.tolist()]
    assert joined == bpe.encode(text)


def test_documents_are_told_apart(bpe):
    spans = [TextSpan("one", True, 1), TextSpan(" more", False, 2), TextSpan("", True, 3)]
    spans.append(TextSpan("two", True, 4))
    for batch in (1, 100):
        got = list(encode_spans(bpe, spans, batch))
        ids = [i for row, _, _ in got for i in row.tolist()]
        assert bpe.decode(ids) == "<|endoftext|>one more<|endoftext|><|endoftext|>two"
        assert [size for _, size, _ in got] == [3, 5, 0, 3]
        got = list(encode_spans(ByteTokenizer(), spans, batch))
        assert b"".join(bytes(row.tolist()) for row, _, _ in got) == b"one more\n\n\n\ntwo"
        assert sum(size for _, size, _ in got) == len("one more\n\n\n\ntwo")


def documents(path, field="text") -> list[str]:
    texts: list[str] = []
    for span in read_spans(text_files(path), field):
        if span.starts_document:
            texts.append("")
        texts[-1] += span.text
    return texts


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
    positions = [span.position for span in read_spans(text_files(tmp_path), "body")]
    assert positions == sorted(positions)
    assert positions[-1] == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_files_that_are_not_what_they_say(tmp_path, monkeypatch):
    def bad(name: str, content: bytes, *words: object) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        refused(lambda: documents(path), path, *words)

    bad("a.csv", b"x", ".jsonl", ".parquet", ".bin")
    bad("a.txt", b"abc\xff", "not UTF-8")
    bad("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2", "not JSON")
    bad("a.jsonl", b'{"body": "x"}\n', "line 1", "'text'", "body", "text_field")
    bad("a.jsonl", b"[1]\n", "line 1", "list")
    monkeypatch.setattr("deeploop.data.text.MAX_LINE", 16)
    bad("a.jsonl", b'{"text": "%s"}\n' % (b"x" * 99), "line 1", "longer than 16")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    bad("a.parquet", b"PAR1 and then nothing", "parquet")
    for column, words in ({"body": ["x"]}, ("no column 'text'", "body")), ({"text": [1]}, "int64"):
        pq.write_table(pa.table(column), tmp_path / "b.parquet")
        bad("a.parquet", (tmp_path / "b.parquet").read_bytes(), *words)
