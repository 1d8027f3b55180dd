"""Encode text with a tokenizer of the Hugging Face library, read from local files."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data import cuts
from deeploop.data.encoded import (
    MAX_FILE,
    MAX_VOCAB,
    REPLACEMENT,
    Encoded,
    clean,
    encoding,
    reading,
    require,
)
from deeploop.utils.disk import user_path, write_text
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import read_bytes, read_json

GPT2_EOT = "<|endoftext|>"
EOT_NAMES = (GPT2_EOT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


class FileTokenizer:
    """A ``tokenizers.Tokenizer`` read from local files."""

    cuts: re.Pattern[str] | None

    def __init__(self, inner: Any, spec: str, name: str) -> None:
        # The string "<|endoftext|>" in a document must not become the special token.
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.name, self.spec = name, spec
        # From the highest id, not the number of entries: ids may have gaps.
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not 0 < self.vocab_size <= MAX_VOCAB:
            problem = f"ids up to {self.vocab_size - 1}" if self.vocab_size else "no ids"
            raise InputError(
                f"tokenizer {spec!r} has an empty vocabulary or one above {MAX_VOCAB} "
                f"({problem}); give another file"
            )
        eot_ids = (inner.token_to_id(name) for name in EOT_NAMES)
        self.eot: int | None = next((i for i in eot_ids if i is not None), None)
        text = inner.to_str()
        self.fingerprint = hashlib.sha256(text.encode()).hexdigest()
        description = json.loads(text)
        if description["model"].get("dropout"):
            raise InputError(
                f"tokenizer {spec!r} drops merges by chance (dropout), so that a text has other "
                "tokens each time; set dropout to null in its file"
            )
        self.cuts = cuts.safe_cuts(description)
        self._unknown = _unknown_id(inner, description["model"])
        self._lossless = _is_lossless(inner, description)

    def encode(self, text: str) -> list[int]:
        with encoding(self.spec):
            return self._inner.encode(clean(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        texts = [clean(text) for text in texts]
        # encode_batch_fast, in newer versions, does not compute offsets.
        fast = getattr(self._inner, "encode_batch_fast", None) if self._lossless else None
        with encoding(self.spec):
            rows = (fast or self._inner.encode_batch)(texts, add_special_tokens=False)
        return [self._encoded(row, text) for row, text in zip(rows, texts, strict=True)]

    def _encoded(self, row: Any, text: str) -> Encoded:
        ids = np.asarray(row.ids, np.uint32)
        if self._lossless:
            return Encoded(ids, len(text.encode()))
        places = np.array(row.offsets, np.int64).reshape(-1, 2)[ids != self._unknown]
        return Encoded(ids, _covered_bytes(text, places))

    def decode(self, ids: Iterable[int]) -> str:
        runs = itertools.groupby(map(int, ids), lambda i: 0 <= i < self.vocab_size)
        with encoding(self.spec, "decode these tokens"):
            return "".join(
                self._inner.decode(list(run), skip_special_tokens=False)
                if inside
                else REPLACEMENT * len(list(run))
                for inside, run in runs
            )

    def byte_lengths(self) -> np.ndarray | None:
        if type(self._inner.decoder).__name__ != "ByteLevel":
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, i in self._inner.get_vocab(with_added_tokens=False).items():
            lengths[i] = len(token)  # byte-level BPE writes each byte as one character
        for i, added in self._inner.get_added_tokens_decoder().items():
            lengths[i] = 0 if added.special else len(added.content.encode())
        for no_text in (self.eot, self._unknown):
            if no_text is not None and no_text >= 0:
                lengths[no_text] = 0
        return lengths

    def save(self, folder: Path) -> str:
        write_text(folder / "tokenizer.json", self._inner.to_str(pretty=True))
        return "tokenizer.json"


def _unknown_id(inner: Any, model: dict[str, Any]) -> int:
    """Return the id for text outside the vocabulary, -1 where there is none."""
    if model.get("unk_id") is not None:
        return int(model["unk_id"])
    token = model.get("unk_token")
    known = inner.token_to_id(token) if token is not None else None
    return -1 if known is None else known


def _is_lossless(inner: Any, description: dict[str, Any]) -> bool:
    """Return True if every byte of a text is in a token: byte-level BPE with all 256 bytes."""
    from tokenizers import pre_tokenizers

    step = description.get("pre_tokenizer") or {}
    byte_level = [step["type"] for step in step.get("pretokenizers", [step]) if step][-1:]
    return (
        byte_level == ["ByteLevel"]
        and description.get("normalizer") is None
        and description["model"]["type"] == "BPE"
        and all(inner.token_to_id(byte) is not None for byte in pre_tokenizers.ByteLevel.alphabet())
    )


def _covered_bytes(text: str, places: np.ndarray) -> int:
    """Count the UTF-8 bytes of the characters in any of ``places``, int64 [n, 2] (start, end)."""
    edges = np.zeros(len(text) + 1, np.int64)
    np.add.at(edges, places[:, 0], 1)
    np.subtract.at(edges, places[:, 1], 1)
    covered = edges.cumsum()[:-1] > 0
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")[covered]
    return len(points) + sum(int((points > limit).sum()) for limit in (0x7F, 0x7FF, 0xFFFF))


def load_file(path: Path, spec: str) -> FileTokenizer:
    """Load the tokenizer in a tokenizer.json."""
    text = read_bytes(path, f"tokenizer {spec!r}", MAX_FILE)
    tokenizers = require("tokenizers", spec)
    path = path.resolve()  # checkpoints record it: it must be valid in any working directory
    name = path.parent.name if path.stem == "tokenizer" else path.stem
    with reading(spec):
        return FileTokenizer(tokenizers.Tokenizer.from_str(text.decode()), str(path), name)


def load_gpt2_files(spec: str) -> FileTokenizer:
    """Load GPT-2's tokenizer from the two files of ``spec``."""
    vocab, merges = _gpt2_paths(spec)
    ids = read_json(vocab, f"tokenizer {spec!r}: {vocab.name}", most=MAX_FILE)
    lines = read_bytes(merges, f"tokenizer {spec!r}: {merges.name}", MAX_FILE)
    tokenizers = require("tokenizers", spec)
    from tokenizers import decoders, models, pre_tokenizers

    with reading(spec):
        rows = [row.removesuffix("\r") for row in lines.decode().split("\n")]
        pairs = [_pair(row) for row in rows if row and not row.startswith("#version")]
        inner = tokenizers.Tokenizer(models.BPE(ids, pairs))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        if inner.token_to_id(GPT2_EOT) is not None:
            inner.add_special_tokens([GPT2_EOT])
        return FileTokenizer(inner, f"gpt2:{vocab.resolve()},{merges.resolve()}", "gpt2")


def _pair(row: str) -> tuple[str, str]:
    first, second = row.split(" ")
    return first, second


def _gpt2_paths(spec: str) -> tuple[Path, Path]:
    """Return the paths of vocabulary and merges; OpenAI's names of them are accepted too."""
    location = spec.removeprefix("gpt2:")
    user_path(location, "tokenizer")
    if "," in location and not Path(location).is_dir():
        vocab, _, merges = location.partition(",")
        pairs = [(Path(vocab.strip()), Path(merges.strip()))]
    else:
        names = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
        pairs = [(Path(location, vocab), Path(location, merges)) for vocab, merges in names]
    for pair in pairs:
        if all(path.exists() for path in pair):
            return pair
    missing = next(path for path in pairs[0] if not path.exists())
    raise InputError(f"tokenizer {spec!r} needs the file {missing}, which does not exist")
