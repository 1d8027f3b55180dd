"""Encode text as tokens and decode tokens as text.

===================  =====================================================  ============
spec                 tokenizer                                              needs
===================  =====================================================  ============
``byte``             UTF-8 bytes: vocabulary 256, no end-of-text token      nothing
``gpt2``             GPT-2's BPE, fetched once and cached by tiktoken       tiktoken
``gpt2:DIR``         the same from DIR's vocab.json and merges.txt          tokenizers
``gpt2:VOCAB,MERGES``  the same from two named files                        tokenizers
``PATH.json``        any Hugging Face tokenizers file (or its folder)       tokenizers
===================  =====================================================  ============

Special tokens are never recognised in text: a document that contains
``<|endoftext|>`` is encoded as those characters. `deeploop.data.text` puts the
end-of-text id before each document.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
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
    """The interface of a tokenizer in the other modules.

    ``decode`` never raises: invalid UTF-8 and ids outside the vocabulary (a padded output
    layer can sample them) become U+FFFD. ``fingerprint`` differs between two tokenizers
    that could encode the same text differently. ``spec`` loads it again, and ``eot`` is
    the id of the end-of-text token.
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
        """Return the UTF-8 bytes each id decodes to, int64 [vocab_size]; special tokens have 0.

        None where the number depends on the ids around it, as with WordPiece.
        """
        ...

    def save(self, folder: Path) -> str:
        """Write the tokenizer's files to ``folder``; returns the spec that loads it from there."""
        ...


def clean(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot encode."""
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
        # 0xFF never occurs in UTF-8, so an id that is not a byte decodes to U+FFFD.
        return bytes(i if 0 <= i < 256 else 0xFF for i in ids).decode(errors="replace")

    def byte_lengths(self) -> np.ndarray | None:
        return np.ones(256, np.int64)

    def save(self, folder: Path) -> str:
        return self.spec


class GPT2Tokenizer:
    """GPT-2's BPE in tiktoken: 50257 tokens, the last of them the end of text."""

    name = spec = fingerprint = "gpt2"

    def __init__(self) -> None:
        tiktoken = require("tiktoken", "gpt2")
        try:
            self._bpe = tiktoken.get_encoding("gpt2")
        except Exception as error:  # tiktoken passes on any error of the network
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
        return b"".join(
            self._bpe.decode_single_token_bytes(i) if 0 <= i < self.vocab_size else b"\xff"
            for i in ids
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
        # The string "<|endoftext|>" in a document must not become the special token.
        inner.encode_special_tokens = True
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        self.name, self.spec = name, spec
        # From the highest id, not the number of entries: ids may have gaps.
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if not self.vocab_size:
            raise InputError(f"tokenizer {spec!r} has an empty vocabulary; give another file")
        eot_ids = (inner.token_to_id(name) for name in EOT_NAMES)
        self.eot: int | None = next((i for i in eot_ids if i is not None), None)
        self.fingerprint = hashlib.sha256(inner.to_str().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(clean(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # encode_batch_fast, in newer versions, does not compute offsets.
        encode = getattr(self._inner, "encode_batch_fast", self._inner.encode_batch)
        rows = encode([clean(text) for text in texts], add_special_tokens=False)
        return [np.asarray(row.ids, np.uint32) for row in rows]

    def decode(self, ids: Iterable[int]) -> str:
        runs = itertools.groupby(map(int, ids), lambda i: 0 <= i < self.vocab_size)
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
        if self.eot is not None:
            lengths[self.eot] = 0
        return lengths

    def save(self, folder: Path) -> str:
        write_text(folder / "tokenizer.json", self._inner.to_str(pretty=True))
        return "tokenizer.json"


def load_tokenizer(spec: str, folder: Path | None = None) -> Tokenizer:
    """Load the tokenizer of a spec from the table at the top of this module.

    A relative path is searched in ``folder`` first, if given: shards and runs have their
    tokenizer's file in their folder. Raises InputError where the spec is of no known kind,
    a file is missing or malformed, or a package is not installed.
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
    path = path.resolve()  # checkpoints record it: it must be valid in any working directory
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
        if all(path.is_file() for path in pair):
            return pair
    missing = next(path for path in pairs[0] if not path.is_file())
    raise InputError(f"tokenizer {spec!r} needs the file {missing}, which does not exist")


def _parse(spec: str, load: Callable[[], Any]) -> Any:
    """Call ``load``; raises InputError, naming the spec, where the file is malformed."""
    try:
        return load()
    except Exception as error:  # the Rust library raises bare Exception
        reason = " ".join(str(error).split())
        raise InputError(
            f"tokenizer {spec!r} could not be read ({reason}); give {KINDS}"
        ) from error


def require(package: str, spec: str, what: str = "tokenizer") -> Any:
    """Import an optional package; raises InputError with the install command if absent."""
    try:
        return __import__(package)
    except ImportError as error:
        raise InputError(
            f"{what} {spec!r} needs the package {package}: pip install 'deeploop[data]'"
        ) from error
