"""Text to tokens and back.

===================  =====================================================  ============
spec                 what it is                                             needs
===================  =====================================================  ============
``byte``             UTF-8 bytes: vocabulary 256, no end-of-text token      nothing
``gpt2``             GPT-2's BPE, fetched once and cached by tiktoken       tiktoken
``gpt2:DIR``         the same from DIR's vocab.json and merges.txt          tokenizers
``gpt2:VOCAB,MERGES``  the same from two named files                        tokenizers
``PATH.json``        any Hugging Face tokenizers file (or its folder)       tokenizers
===================  =====================================================  ============

Special tokens are never read out of text: a document that quotes
``<|endoftext|>`` is encoded as those characters. `deeploop.data.text` puts the
end-of-text id before each document.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from deeploop.utils.disk import user_path, write_text
from deeploop.utils.errors import InputError

GPT2_EOT = "<|endoftext|>"
EOT_NAMES = (GPT2_EOT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
KINDS = "byte, gpt2, gpt2:DIR, gpt2:VOCAB,MERGES or a path to a tokenizer.json"


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer.

    ``decode`` never raises: broken UTF-8 and ids past the vocabulary (a padded
    output layer can sample them) become U+FFFD. ``fingerprint`` differs whenever
    two tokenizers could encode the same text differently.
    """

    name: str
    spec: str
    vocab_size: int
    eot: int | None
    fingerprint: str

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def byte_lengths(self) -> np.ndarray | None:
        """UTF-8 bytes each id stands for, int64 [vocab_size]; special tokens stand for none.

        None where that depends on an id's neighbours, as with WordPiece.
        """
        ...

    def save(self, folder: Path) -> str:
        """Put what is needed to reload it into ``folder``; returns the spec from there."""
        ...


def clean(text: str) -> str:
    """``text`` with lone surrogates (JSON can carry them) replaced, so UTF-8 can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class ByteTokenizer:
    """Each UTF-8 byte is a token."""

    name = spec = fingerprint = "byte"
    vocab_size = 256
    eot: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(clean(text).encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(clean(text).encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        # 0xFF occurs nowhere in UTF-8, so an id that is no byte decodes to U+FFFD.
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode(errors="replace")

    def byte_lengths(self) -> np.ndarray | None:
        return np.ones(256, np.int64)

    def save(self, folder: Path) -> str:
        return self.spec


class GPT2Tokenizer:
    """GPT-2's BPE by tiktoken: 50257 tokens, the last of them the end of text."""

    name = spec = fingerprint = "gpt2"

    def __init__(self) -> None:
        tiktoken = require("tiktoken", "gpt2")
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # whatever the network stack raises
            raise InputError(
                f"tokenizer 'gpt2' could not be fetched ({type(error).__name__}); connect once, or "
                "give local files as gpt2:DIR, a folder with vocab.json and merges.txt"
            ) from error
        self.vocab_size: int = self._bpe.n_vocab
        self.eot: int | None = self._bpe.eot_token

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode_ordinary(clean(text))

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        rows = self._bpe.encode_ordinary_batch([clean(text) for text in texts])
        return [np.asarray(row, np.uint32) for row in rows]

    def decode(self, ids: Iterable[int]) -> str:
        known = (i if 0 <= i < self.vocab_size else None for i in ids)
        return b"".join(
            b"\xff" if i is None else self._bpe.decode_single_token_bytes(i) for i in known
        ).decode(errors="replace")

    def byte_lengths(self) -> np.ndarray | None:
        lengths = [len(self._bpe.decode_single_token_bytes(i)) for i in range(self.vocab_size)]
        lengths[self._bpe.eot_token] = 0
        return np.array(lengths, np.int64)

    def save(self, folder: Path) -> str:
        return self.spec


class FileTokenizer:
    """A ``tokenizers.Tokenizer`` read from local files."""

    def __init__(self, inner: Any, spec: str, name: str) -> None:
        # Text is data: "<|endoftext|>" inside a document must not become the token.
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.name, self.spec = name, spec
        # The highest id decides, not the number of entries: ids may have holes.
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not self.vocab_size:
            raise InputError(f"tokenizer {spec!r} has an empty vocabulary; give another file")
        found = (inner.token_to_id(name) for name in EOT_NAMES)
        self.eot: int | None = next((i for i in found if i is not None), None)
        self.fingerprint = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(clean(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # The fast form, where there is one, leaves out the offsets.
        encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        rows = encode([clean(text) for text in texts], add_special_tokens=False)
        return [np.asarray(row.ids, np.uint32) for row in rows]

    def decode(self, ids: Iterable[int]) -> str:
        known = itertools.groupby(map(int, ids), lambda i: 0 <= i < self.vocab_size)
        return "".join(
            self._inner.decode(list(run), skip_special_tokens=False)
            if inside
            else REPLACEMENT * len(list(run))
            for inside, run in known
        )

    def byte_lengths(self) -> np.ndarray | None:
        if type(self._inner.decoder).__name__ != "ByteLevel":
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, i in self._inner.get_vocab(with_added_tokens=False).items():
            lengths[i] = len(token)  # byte-level BPE writes each byte as one character
        for i, added in self._inner.get_added_tokens_decoder().items():
            lengths[i] = 0 if added.special else len(added.content.encode())
        if self.eot is not None:
            lengths[self.eot] = 0
        return lengths

    def save(self, folder: Path) -> str:
        write_text(folder / "tokenizer.json", self._inner.to_str(pretty=True))
        return "tokenizer.json"


def load_tokenizer(spec: str, folder: Path | None = None) -> Tokenizer:
    """The tokenizer ``spec`` names (see the module's table).

    A relative path is looked up in ``folder`` first where one is given: shards
    carry their tokenizer beside them. Raises InputError where the spec is of no
    known kind, a file is missing or malformed, or a package is not installed.
    """
    if spec == "byte":
        return ByteTokenizer()
    if spec == "gpt2":
        return GPT2Tokenizer()
    if spec.startswith("gpt2:"):
        return _load_gpt2_files(spec)
    path = user_path(spec, "tokenizer")
    if folder and (folder / spec).exists():
        path = folder / spec
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"tokenizer {spec!r} is neither a known kind nor a file; give {KINDS}")
    tokenizers = require("tokenizers", spec)
    inner = _parse(spec, lambda: tokenizers.Tokenizer.from_file(str(path)))
    path = path.resolve()  # the spec is kept in checkpoints: it must hold from anywhere
    name = path.parent.name if path.stem == "tokenizer" else path.stem
    return FileTokenizer(inner, str(path), name)


def _load_gpt2_files(spec: str) -> FileTokenizer:
    vocab, merges = _gpt2_paths(spec)
    tokenizers = require("tokenizers", spec)
    from tokenizers import decoders, models, pre_tokenizers

    model = _parse(spec, lambda: models.BPE.from_file(str(vocab), str(merges)))
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if inner.token_to_id(GPT2_EOT) is not None:
        inner.add_special_tokens([GPT2_EOT])
    return FileTokenizer(inner, f"gpt2:{vocab.resolve()},{merges.resolve()}", "gpt2")


def _gpt2_paths(spec: str) -> tuple[Path, Path]:
    """vocab and merges; OpenAI's own names (encoder.json, vocab.bpe) are known too."""
    where = spec.removeprefix("gpt2:")
    user_path(where, "tokenizer")
    if "," in where and not Path(where).is_dir():
        vocab, _, merges = where.partition(",")
        pairs = [(Path(vocab.strip()), Path(merges.strip()))]
    else:
        names = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
        pairs = [(Path(where, vocab), Path(where, merges)) for vocab, merges in names]
    for pair in pairs:
        if all(path.is_file() for path in pair):
            return pair
    missing = next(path for path in pairs[0] if not path.is_file())
    raise InputError(f"tokenizer {spec!r} needs the file {missing}, which does not exist")


def _parse(spec: str, load: Any) -> Any:
    try:
        return load()
    except Exception as error:  # the Rust library raises bare Exception
        reason = " ".join(str(error).split())
        raise InputError(
            f"tokenizer {spec!r} could not be read ({reason}); give {KINDS}"
        ) from error


def require(package: str, spec: str, what: str = "tokenizer") -> Any:
    try:
        return __import__(package)
    except ImportError as error:
        raise InputError(
            f"{what} {spec!r} needs the package {package}: pip install 'deeploop[data]'"
        ) from error
