"""Write small corpora, read streams completely, and check refusals."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from deeploop.data.stream import ArraySegment, Segment, TokenStream
from deeploop.utils.errors import InputError


def refused(call: Callable[[], object], *words: object) -> None:
    """Assert that `call` raises InputError in one line with all the words in it."""
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message


def read_all(tokens: TokenStream | Segment) -> list[int]:
    return tokens.read(0, len(tokens)).tolist()


def stream_of(tokens: Iterable[int], vocab_size: int = 1 << 16, segments: int = 1) -> TokenStream:
    """A stream over uint16 tokens in memory, in `segments` segments of about equal length."""
    arrays = np.array_split(np.asarray(tokens, np.uint16), segments)
    return TokenStream(
        [ArraySegment(f"segment {i}", array) for i, array in enumerate(arrays)], vocab_size
    )


def write_jsonl(path: Path, texts: Iterable[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def write_raw_shard(path: Path, tokens, magic=20240520, version=1, dtype="<u2", ntok=None) -> Path:
    """Write an llm.c shard by hand; `ntok` in the header may be wrong."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if ntok is None else ntok
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def train_bpe(folder: Path, text: str, vocab_size: int) -> Path:
    """Write vocab.json and merges.txt of a byte-level BPE with an end-of-text token."""
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [text], vocab_size, special_tokens=["<|endoftext|>"], show_progress=False
    )
    bpe.save_model(str(folder))
    return folder
