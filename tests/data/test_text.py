"""Every reader gives the same documents; the streaming encoder, the tokens of the whole."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeploop.data.text import Piece, cut, encode_pieces, read_pieces, split_text, text_files
from deeploop.data.tokenizer import ByteTokenizer, load_tokenizer
from deeploop.utils.errors import InputError


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A small byte-level BPE with an end-of-text token."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bpe")
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        ["the block runs again, and again; isn't that odd?\n\n  Indeed  it is. " * 20],
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    trained.save_model(str(folder))
    return load_tokenizer(f"gpt2:{folder}")


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
    monkeypatch.setattr("deeploop.data.text.MAX_LINE", 16)
    bad("a.jsonl", b'{"text": "%s"}\n' % (b"x" * 99), "line 1", "longer than 16")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    bad("a.parquet", b"PAR1 and then nothing", "parquet")
    for column, words in ({"body": ["x"]}, ("no column 'text'", "body")), ({"text": [1]}, "int64"):
        pq.write_table(pa.table(column), tmp_path / "b.parquet")
        bad("a.parquet", (tmp_path / "b.parquet").read_bytes(), *words)
