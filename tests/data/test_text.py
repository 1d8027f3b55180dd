"""Spans encode to the tokens of the whole, for every tokenizer; documents are told apart."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeploop.data.cuts import ANYWHERE, AT_SPACES, AT_WORDS
from deeploop.data.text import TextSpan, encode_spans, encode_to, split_text
from deeploop.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.helpers.data import refused, train_bpe

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import models, normalizers, pre_tokenizers  # noqa: E402

LETTERS = "ab1 ,.'\n\u3002\u00e9\uff0c\u2581_"
VOCABULARY = {
    c: i for i, c in enumerate(["<unk>", *LETTERS, "\u0120", "ab", "\u2581a", "##b", "ba"])
}
GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A small byte-level BPE with an end-of-text token."""
    text = "the block runs again, and again; isn't that odd?\n\n  Indeed  it is. " * 20
    return load_tokenizer(f"gpt2:{train_bpe(tmp_path_factory.mktemp('bpe'), text, 400)}")


def bpe_model():
    """A BPE with an unknown token, whose merges reach over spaces where nothing divides them."""
    merges = [("a", "b"), ("\u2581", "a"), ("b", "a")]
    vocab = {token: i for token, i in VOCABULARY.items() if token != "##b"}
    more = {"b ": 40, " a": 41}
    return models.BPE({**vocab, **more}, [*merges, ("b", " "), (" ", "a")], unk_token="<unk>")


def byte_level(**options):
    """A byte-level BPE with merges into words and spaces."""
    alphabet = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    more = {"ab": 256, "\u0120a": 257, "b\u0120": 258}
    model = models.BPE({**alphabet, **more}, [("a", "b"), ("\u0120", "a"), ("b", "\u0120")])
    return model, pre_tokenizers.ByteLevel(**options)


def unigram():
    return models.Unigram(
        [("<unk>", 0.0), *((t, -1.0 - len(t)) for t in VOCABULARY if t != "<unk>")], 0
    )


def split(pattern):
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


PIECES = models.WordPiece({**VOCABULARY, "[UNK]": 50}, unk_token="[UNK]")
NO_SPACE = {"add_prefix_space": False}
# name: (model and pre-tokenizer, normaliser, where it may be cut)
TOKENIZERS = {
    "byte-level": (byte_level(**NO_SPACE), None, AT_WORDS),
    "byte-level, a space before": (byte_level(), None, AT_SPACES),
    "byte-level, undivided": (byte_level(use_regex=False, **NO_SPACE), None, None),
    "GPT-4's pattern": ((bpe_model(), split(GPT4)), None, AT_WORDS),
    "unknown pattern": ((bpe_model(), split("a b")), None, None),
    "BPE on everything": ((bpe_model(), None), None, None),
    "metaspace": ((unigram(), pre_tokenizers.Metaspace()), None, AT_SPACES),
    "metaspace, undivided": ((unigram(), pre_tokenizers.Metaspace(split=False)), None, None),
    "WordPiece": (
        (PIECES, pre_tokenizers.BertPreTokenizer()), normalizers.BertNormalizer(), AT_WORDS
    ),
    "NFKC": ((unigram(), pre_tokenizers.WhitespaceSplit()), normalizers.NFKC(), AT_SPACES),
    "strip": ((bpe_model(), pre_tokenizers.Whitespace()), normalizers.Strip(), None),
    "prepend": ((bpe_model(), pre_tokenizers.Whitespace()), normalizers.Prepend("a"), None),
    "digits, then words": (
        (bpe_model(), pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(), pre_tokenizers.Whitespace()]
        )),
        normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
        AT_WORDS,
    ),
}  # fmt: skip


def saved(path, name):
    """Write a tokenizer of the table and load it as a user's."""
    (model, pre_tokenizer), normalizer, cuts = TOKENIZERS[name]
    inner = tokenizers.Tokenizer(model)
    if pre_tokenizer is not None:
        inner.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.save(str(path / "tokenizer.json"))
    return load_tokenizer(str(path)), cuts


@pytest.mark.parametrize("name", TOKENIZERS)
def test_spans_encode_to_the_tokens_of_the_whole(name, tmp_path_factory):
    tokenizer, cuts = saved(tmp_path_factory.mktemp("tokenizer"), name)
    assert tokenizer.cuts is cuts

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.text(st.sampled_from(LETTERS), max_size=80), st.integers(1, 8))
    def check(text, size):
        spans = list(split_text([text], tokenizer.cuts, size=size))
        assert "".join(spans) == text
        rows = tokenizer.encode_batch(spans)
        assert [i for row in rows for i in row.ids.tolist()] == tokenizer.encode(text)

    check()
    assert len(list(split_text(["ab ab " * 9], tokenizer.cuts, size=2))) > 1 or cuts is None


def test_gpt2s_spans_encode_to_the_tokens_of_the_whole(bpe):
    text = "".join(itertools.islice(itertools.cycle("it's a1 b\u3002\n\n  c, d \u00e9"), 700))
    spans = list(split_text([text], bpe.cuts, size=16))
    assert len(spans) > 9
    joined = [i for row in bpe.encode_batch(spans) for i in row.ids.tolist()]
    assert joined == bpe.encode(text)


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("b a", {}),
        ("ab", {"lstrip": True}),
        ("ab", {"rstrip": True}),
        ("ab", {"single_word": True}),
    ],
)
def test_an_added_token_over_a_space_forbids_cuts(tmp_path, content, options):
    tokenizer, _ = saved(tmp_path, "byte-level")
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    inner.add_tokens([tokenizers.AddedToken(content, **options)])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.cuts is AT_WORDS and load_tokenizer(str(tmp_path)).cuts is None


def test_a_tokenizer_that_draws_its_merges_is_refused(tmp_path):
    tokenizers.Tokenizer(models.BPE({"a": 0}, [], dropout=0.1)).save(str(tmp_path / "x.json"))
    refused(lambda: load_tokenizer(str(tmp_path / "x.json")), "x.json", "dropout")


def test_a_document_that_cannot_be_cut_is_limited():
    assert list(split_text(["ab", "cd"], None, most=4)) == ["abcd"]
    refused(lambda: list(split_text(["ab", "cde"], None, most=4, source="x.txt")), "x.txt", "4")
    refused(lambda: list(split_text(["a" * 9], AT_WORDS, size=2, most=8)), "8 characters")


@settings(deadline=None)
@given(st.data(), st.text(st.sampled_from("ab \n\u00e9"), max_size=200))
def test_spans_do_not_depend_on_how_the_text_is_buffered(data, text):
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *points], [*points, len(text)], strict=True)]
    for cuts in (ANYWHERE, AT_WORDS, AT_SPACES, None):
        whole = list(split_text([text], cuts, size=10))
        assert "".join(whole) == text
        assert list(split_text(chunks, cuts, size=10)) == whole


def test_endless_text_needs_bounded_memory():
    for text, cuts in (("x" * 1000, ANYWHERE), ("ab c d " * 200, AT_WORDS)):
        spans = list(itertools.islice(split_text(itertools.repeat(text), cuts), 50))
        assert all(4096 <= len(span) <= 4200 for span in spans)
    endless = (TextSpan(str(i), True, i) for i in itertools.count())
    got = list(itertools.islice(encode_spans(ByteTokenizer(), endless, batch=100), 500))
    assert [span.position for span in got] == list(range(500))


def test_text_in_no_token_is_not_counted(tmp_path):
    """A BPE that drops what it does not know, and one that replaces it by its unknown token."""
    text = "ab \u65e5\u672c ab"
    for unknown in ({}, {"unk_token": "<unk>"}):
        model = models.BPE({"<unk>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")], **unknown)
        inner = tokenizers.Tokenizer(model)
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        inner.save(str(tmp_path / "x.json"))
        tokenizer = load_tokenizer(str(tmp_path / "x.json"))
        marks, size = encode_to(tokenizer, [TextSpan(text, True, 1)], lambda ids: None)
        assert marks[-1].tolist() == [2 if not unknown else 4, 4] and size == len(text.encode())


def test_documents_are_told_apart(bpe):
    spans = [TextSpan("one", True, 1), TextSpan(" more", False, 2), TextSpan("", True, 3)]
    spans.append(TextSpan("two", True, 4))
    for batch in (1, 100):
        got = list(encode_spans(bpe, spans, batch))
        ids = [i for span in got for i in span.ids.tolist()]
        assert bpe.decode(ids) == "<|endoftext|>one more<|endoftext|><|endoftext|>two"
        assert [span.bytes for span in got] == [3, 5, 0, 3]
        got = list(encode_spans(ByteTokenizer(), spans, batch))
        assert b"".join(bytes(span.ids.tolist()) for span in got) == b"one more\n\n\n\ntwo"
        assert sum(span.bytes for span in got) == len("one more\n\n\n\ntwo")
