"""Every format gives the same documents; damage is named with its place."""

import gzip
import json
import sys

import pytest

from deeploop.data.folders import text_files
from deeploop.data.text import read_spans
from deeploop.data.tokenizer import ByteTokenizer
from tests.helpers.data import refused

TEXTS = ["one", "zwei \u00e9", "x " * 9000, "\r\nlast\n"]


def documents(path, field="text") -> list[str]:
    texts: list[str] = []
    for span in read_spans(text_files(path).train, field, ByteTokenizer()):
        if span.starts_document:
            texts.append("")
        texts[-1] += span.text
    return texts


def as_text(monkeypatch):
    """Read as for a tokenizer that is not of bytes."""
    monkeypatch.setattr("deeploop.data.text.ByteTokenizer", type(None))


def write_all(folder):
    with open(folder / "a.jsonl", "w") as file:
        file.write("\ufeff" + json.dumps({"body": None}) + "\nnull\n")
        file.writelines(json.dumps({"body": text, "n": 1}) + "\n\n" for text in TEXTS)
    rows = "".join(f'1,"{text}"\r\n' for text in TEXTS)
    (folder / "b.csv").write_bytes(f"\ufeffn,body\r\n{rows}2,\r\n".encode())
    return {name: (folder / name).read_bytes() for name in ("a.jsonl", "b.csv")}


def test_every_reader_gives_the_same_documents(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    write_all(tmp_path)
    table = pa.table({"body": [*TEXTS, None]})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=2)
    (tmp_path / "d.txt").write_bytes(TEXTS[-1].encode())
    for name in ("a.jsonl", "b.csv", "c.parquet"):
        assert documents(tmp_path / name, "body") == TEXTS, name
    assert documents(tmp_path / "d.txt") == TEXTS[-1:]
    assert documents(tmp_path, "body") == TEXTS * 3 + TEXTS[-1:]
    files = text_files(tmp_path).train
    positions = [span.position for span in read_spans(files, "body", ByteTokenizer())]
    assert positions == sorted(positions)
    assert positions[-1] == sum(file.stat().st_size for file in files)


def test_compressed_files_give_the_text_in_them(tmp_path):
    plain = write_all(tmp_path) | {"c.txt": "a \u00e9\r\n".encode(), "d": b"no ending"}
    for name, content in plain.items():
        (tmp_path / name).write_bytes(content)
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(content[:9]) + gzip.compress(content[9:]))
        assert documents(packed, "body") == documents(tmp_path / name, "body"), name
    packed.write_bytes(packed.read_bytes()[:-6])
    refused(lambda: documents(packed), packed, "could not be read")
    packed.write_bytes(b"no gzip")
    refused(lambda: documents(packed), packed, "could not be read")


def test_zstandard_is_read_or_named(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refused(lambda: documents(path), path, "needs the package zstandard")
    monkeypatch.undo()
    zstandard = pytest.importorskip("zstandard")
    path.write_bytes(zstandard.compress(b"one") + zstandard.compress(b" two"))
    assert documents(path) == ["one two"]
    path.write_bytes(path.read_bytes()[:-3])
    refused(lambda: documents(path), path, "could not be read")


def test_a_byte_that_is_not_utf8_is_named_with_its_place(tmp_path, monkeypatch):
    as_text(monkeypatch)
    monkeypatch.setattr("deeploop.data.readers.BLOCK", 4)  # also over the ends of blocks
    path = tmp_path / "a.txt"
    for content, offset, line in (
        (b"abc\xff", 3, 1),
        (b"a\n\xc3\xa9\nx\xe9y", 6, 3),
        (b"ab\xc3", 2, 1),
    ):
        path.write_bytes(content)
        refused(
            lambda: documents(path),
            path,
            f"{content[offset]:#x} at offset {offset} ",
            f"line {line})",
        )
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    refused(lambda: documents(path), path, "0xff at offset 24 ", "line 2)")


def test_bytes_are_bytes_for_the_byte_tokenizer(tmp_path):
    content = b"\xff\xfe a\r\n\xc3 \xed\xa0\x80\n" * 3
    for name in ("a.txt", "b"):
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            [text] = documents(path)
            assert bytes(ByteTokenizer().encode(text)) == content


def test_files_that_are_not_what_they_say(tmp_path, monkeypatch):
    def bad(name: str, content: bytes, *words: object) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        refused(lambda: documents(path), path, *words)

    bad("a.pdf", b"x", ".jsonl", ".parquet", ".bin")
    bad("a.csv", b"a,b\n1,2\n", "no column 'text'", "a, b", "text_field")
    bad("a.csv", b"text,b\n1\n", "line 2", "1 columns")
    bad("a.csv", b'text\n"x\n', "not CSV")
    bad("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2", "not JSON")
    bad("a.jsonl", b'{"body": "x"}\n', "line 1", "'text'", "body", "text_field")
    bad("a.jsonl", b"[1]\n", "line 1", "list")
    monkeypatch.setattr("deeploop.data.readers.MAX_LINE", 16)
    bad("a.jsonl", b'{"text": "%s"}\n' % (b"x" * 99), "line 1", "longer than 16")
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    bad("a.parquet", b"PAR1 and then nothing", "parquet")
    for column, words in ({"body": ["x"]}, ("no column 'text'", "body")), ({"text": [1]}, "int64"):
        pq.write_table(pa.table(column), tmp_path / "b.parquet")
        bad("a.parquet", (tmp_path / "b.parquet").read_bytes(), *words)
