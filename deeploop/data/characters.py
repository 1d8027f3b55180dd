"""Encode text by a table of single characters, as nanoGPT's character data does.

nanoGPT writes `meta.pkl` beside `train.bin`: a pickled dict with `vocab_size`, `itos` (id to
character) and `stoi`. A pickle can run any code, so it is read with plain containers, text
and integers alone, and written as JSON wherever a tokenizer is saved.
"""

import hashlib
import io
import json
import pickle
import pickletools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data import cuts
from deeploop.data.encoded import MAX_VOCAB, REPLACEMENT, Encoded
from deeploop.utils.disk import write_json
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import foreign, read_bytes, read_json

FILE = "characters.json"  # {"characters": [text of id 0, text of id 1, ...]}
META_PICKLE = "meta.pkl"
MAX_MEMO = 1 << 22  # entries of a pickle's memo: each takes memory up to the highest
PLAIN_OPCODES = {
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT",
    "GET", "BINGET", "LONG_BINGET", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1",
    "BININT2", "LONG", "LONG1", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS",
}  # fmt: skip
# No tuples: one nested a million times as a key of a dict would overflow the stack.


class CharacterTokenizer:
    """Each character of a table is a token, with no end-of-text token.

    Args:
        table: text of each id, in order.
        spec: path of the table's file.
    """

    name = "characters"
    eot: int | None = None
    cuts: re.Pattern[str] | None = cuts.ANYWHERE

    def __init__(self, table: Sequence[str], spec: str) -> None:
        self.spec = spec
        self._table = list(table)
        self._ids = {text: i for i, text in enumerate(self._table)}
        self.vocab_size = len(self._table)
        self.fingerprint = hashlib.sha256(json.dumps(self._table).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise InputError(
                f"tokenizer {self.spec!r} has no character {error.args[0]!r} among its "
                f"{self.vocab_size}; leave it out of the text"
            ) from error

    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        rows = [np.array(self.encode(text), np.uint32) for text in texts]
        return [Encoded(row, len(text.encode())) for row, text in zip(rows, texts, strict=True)]

    def decode(self, ids: Iterable[int]) -> str:
        inside = range(self.vocab_size)
        return "".join(self._table[i] if i in inside else REPLACEMENT for i in map(int, ids))

    def byte_lengths(self) -> np.ndarray | None:
        return np.array([len(text.encode()) for text in self._table], np.int64)

    def save(self, folder: Path) -> str:
        write_json(folder / FILE, {"characters": self._table})
        return FILE


def load(path: Path) -> CharacterTokenizer:
    """Load the characters of nanoGPT's meta.pkl, or of the JSON file `save` writes."""
    if path.suffix == ".pkl":
        table = _pickled_table(path)
    else:
        table = read_json(path, types={"characters": list})["characters"]
    characters = all(isinstance(text, str) and len(text) == 1 for text in table)
    if not characters or len(set(table)) != len(table) or not table:
        raise InputError(f"{path}: is not a table of different single characters; restore the file")
    if any("\ud800" <= text <= "\udfff" for text in table):
        raise InputError(f"{path}: has half of a surrogate pair as a character; restore the file")
    return CharacterTokenizer(table, str(path.resolve()))


def _pickled_table(path: Path) -> list[Any]:
    """Return the characters in the order of their ids."""
    itos = _plain_pickle(path).get("itos")
    if isinstance(itos, dict):
        if any(type(i) is not int for i in itos) or set(itos) != set(range(len(itos))):
            raise InputError(f"{path}: the ids of itos are not 0, 1, 2, ...; write the file again")
        itos = [itos[i] for i in range(len(itos))]
    if not isinstance(itos, list) or len(itos) > MAX_VOCAB:
        raise InputError(f"{path}: has no table itos of id to character; write the file again")
    return itos


def _plain_pickle(path: Path) -> dict[str, Any]:
    """Read a pickled dict of plain containers, text and integers; nothing else is carried out.

    The opcodes are checked before any is carried out, because some take memory by a number
    in the file, and others call what the file names.
    """
    data = read_bytes(path)
    with foreign(str(path), "write the file again"):
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in PLAIN_OPCODES:
                raise InputError(
                    f"{path}: holds more than plain text and numbers ({opcode.name}), which is not "
                    "read for safety; write it again with a dict of itos and stoi alone"
                )
            if "PUT" in opcode.name and int(argument or 0) > MAX_MEMO:
                raise InputError(f"{path}: is damaged (memo {argument}); write the file again")
        value = _PlainUnpickler(io.BytesIO(data)).load()
    if not isinstance(value, dict):
        raise InputError(f"{path}: is not a dict with itos and stoi; write the file again")
    return value


class _PlainUnpickler(pickle.Unpickler):
    """Refuse every class and function, also if an opcode that names one should get past."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain data")
