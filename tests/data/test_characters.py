"""nanoGPT's character data trains and generates; a pickle can do nothing but hold a table."""

import json
import pickle

import numpy as np
import pytest

from deeploop.data.characters import CharacterTokenizer, load
from deeploop.data.corpus import load_corpus
from deeploop.data.tokenizer import load_tokenizer
from tests.helpers.data import read_all, refused

TABLE = ["\n", " ", "a", "b", "é"]


def write_meta(path, table=TABLE, **more):
    itos = dict(enumerate(table))
    meta = {"vocab_size": len(table), "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    path.write_bytes(pickle.dumps(meta | more))


@pytest.fixture
def data(tmp_path):
    """A folder as nanoGPT's prepare.py writes it."""
    folder = tmp_path / "shakespeare_char"
    folder.mkdir()
    write_meta(folder / "meta.pkl")
    for name in ("train.bin", "val.bin"):
        np.array([2, 3, 4, 1, 2] * 9, "<u2").tofile(folder / name)
    return folder


def test_characters_are_decoded_and_counted(data):
    corpus = load_corpus(str(data))
    assert corpus.vocab_size == 5 and corpus.bytes_per_token == 6 / 5
    assert corpus.tokenizer.decode(read_all(corpus.val)[:5]) == "abé a"
    assert corpus.tokenizer.encode("b é") == [3, 1, 4]
    assert corpus.tokenizer.decode([2, 9, -1]) == "a\ufffd\ufffd"
    refused(lambda: corpus.tokenizer.encode("abc"), "meta.pkl", "'c'")
    assert load_corpus(str(data / "val.bin")).tokenizer.name == "characters"


def test_characters_are_saved_without_a_pickle(data, tmp_path):
    tokenizer = load_tokenizer(str(data / "meta.pkl"))
    again = load_tokenizer(tokenizer.save(tmp_path), tmp_path)
    assert again.fingerprint == tokenizer.fingerprint and again.encode("é a") == [4, 1, 2]
    (tmp_path / "characters.json").write_text(json.dumps({"characters": ["a", "bc"]}))
    refused(lambda: load(tmp_path / "characters.json"), "characters.json", "single characters")


def test_another_tokenizer_than_that_of_the_shards_is_refused(data, tmp_path):
    refused(lambda: load_corpus(str(data), "byte"), "'byte' has 256", "characters", "auto")
    write_meta(tmp_path / "meta.pkl", ["\n", " ", "b", "a", "é"])  # of the same size
    refused(lambda: load_corpus(str(data), str(tmp_path / "meta.pkl")), "5 ids", "auto")
    assert load_corpus(str(data), str(data / "meta.pkl")).tokenizer.vocab_size == 5
    (data / "meta.pkl").unlink()
    assert load_corpus(str(data), "byte").tokenizer.name == "byte"


class Harm:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_with_more_than_a_table_is_never_carried_out(tmp_path):
    path = tmp_path / "meta.pkl"
    for protocol in range(6):
        content = {"itos": {0: "a"}, "x": Harm(tmp_path / "harm")}
        path.write_bytes(pickle.dumps(content, protocol))
        refused(lambda: load(path), path, "not read for safety")
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"", b"no pickle", pickle.dumps({"itos": {0: "a"}})[:-3], pickle.dumps([1]),
        pickle.dumps({}), pickle.dumps({"itos": {0: "a", 2: "b"}}), pickle.dumps({"itos": {}}),
        pickle.dumps({"itos": {0: 1}}), pickle.dumps({"itos": {0: "a", 1: "a"}}),
        pickle.dumps({"itos": ["ab"]}), pickle.dumps({"itos": ["\ud800"]}),
        pickle.dumps({"itos": {(): "a"}}), b"\x80\x04}r\xff\xff\xff\xff.", b"]" * 99 + b".",
        b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\x00\x00.",
    ],
)  # fmt: skip
def test_malformed_tables_are_refused_in_a_sentence(tmp_path, content):
    (tmp_path / "meta.pkl").write_bytes(content)
    refused(lambda: load_tokenizer(str(tmp_path / "meta.pkl")), "meta.pkl")


def test_tables_of_plain_lists_and_of_every_protocol_are_read(tmp_path):
    for protocol in range(6):
        (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": TABLE}, protocol))
        assert isinstance(load(tmp_path / "meta.pkl"), CharacterTokenizer)
