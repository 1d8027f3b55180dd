"""Open, check and write token shards on disk.

Three layouts of ``.bin`` file are read as they are, all little-endian:

====================  ==========================================  ======
layout                header                                      tokens
====================  ==========================================  ======
llm.c, modded-nanogpt 256 int32: magic 20240520, version 1, ntok   uint16
llm.c's Llama-3 form  256 int32: magic 20240801, version 7, ntok   uint32
nanoGPT               none; only as ``train.bin`` and ``val.bin``  uint16
====================  ==========================================  ======

The two llm.c layouts are also what is written: the first when every id fits in
16 bits, the second otherwise. A headerless file is recognised by its name alone, so
that a damaged header is refused rather than read as tokens. (Tokens of GPT-2 cannot
look like a header by chance: both magics contain a token id above 50256.)
"""

import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deeploop.data.encoded import MAX_VOCAB
from deeploop.data.folders import choose_by_name, listed
from deeploop.data.stream import FileSegment
from deeploop.utils.disk import atomic_file, exclusive
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import open_regular, read_json

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
LAYOUTS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
HEADERLESS = ("train.bin", "val.bin")
META = "meta.json"  # written last: the shards' names, their tokenizer, vocabulary and counts
UNFINISHED = ".unfinished"  # marks a folder while it is being written
REPLACEABLE = re.compile(r"_(train|val)_\d{6}\.bin$|^\..*\.tmp$|^meta\.json$")  # by a rerun
META_TYPES = {
    "shards": list, "vocab_size": int, "tokenizer?": (str, type(None)),
    "tokenizer_fingerprint?": (str, type(None)), "tokens?": dict, "bytes?": dict,
    "dropped_bytes?": (int, type(None)), "sha256?": dict,
}  # fmt: skip


def open_shard(path: Path) -> FileSegment:
    """Open a shard of any of the three layouts; its header must agree with the file's size."""
    with open_regular(path, f"shard {path}") as file:
        size = path.stat().st_size
        header = np.frombuffer(file.read(12), "<i4", count=min(3, size // 4))
    if size == 0:
        raise InputError(f"shard {path} is empty; write it again")
    magic = int(header[0]) if len(header) else None
    if magic in LAYOUTS:
        return _open_with_header(path, size, header)
    if path.name not in HEADERLESS:
        raise InputError(
            f"shard {path} starts with magic {magic}, not {' or '.join(map(str, LAYOUTS))}; "
            "files without a header must be called train.bin or val.bin"
        )
    if size % 2:
        raise InputError(f"shard {path} has {size} bytes, not a multiple of the 2 of a uint16")
    return FileSegment(str(path), 0, "<u2", size // 2)


def _open_with_header(path: Path, size: int, header: np.ndarray) -> FileSegment:
    if size < HEADER_BYTES:
        raise InputError(
            f"shard {path} has an incomplete header: {size} bytes of {HEADER_BYTES}; write it again"
        )
    magic, version, tokens = (int(x) for x in header)
    expected, dtype = LAYOUTS[magic]
    if version != expected:
        raise InputError(
            f"shard {path} has version {version}; with magic {magic} it must be {expected}"
        )
    if tokens < 1:
        raise InputError(f"shard {path} has ntok {tokens} in its header; it must be at least 1")
    token_bytes = size - HEADER_BYTES
    if token_bytes != tokens * np.dtype(dtype).itemsize:
        raise InputError(
            f"shard {path} has ntok {tokens} in its header but {token_bytes} bytes of tokens, "
            f"not {tokens * np.dtype(dtype).itemsize}; write or download it again"
        )
    return FileSegment(str(path), HEADER_BYTES, dtype, tokens)


@dataclass(frozen=True)
class ShardSet:
    """The shards of a file or folder by split; ``meta`` is empty where there is no meta.json."""

    train: list[FileSegment]
    val: list[FileSegment]  # empty where no shard is held out: the caller splits train
    meta: dict[str, Any]
    remark: str = ""  # names of files that are not read


def open_shards(path: Path) -> ShardSet:
    """Open the shards of a folder (or one file) in order of name, split into train and val.

    The names say which (`deeploop.data.folders`). Where none does, the first of several is
    held out, as in llm.c and modded-nanogpt.
    """
    if not path.is_dir():
        return ShardSet([open_shard(path)], [], {})
    if (path / UNFINISHED).exists():
        raise InputError(f"data folder {path} is unfinished; run the same 'deeploop data' again")
    meta = _read_meta(path) if (path / META).exists() else {}
    names = sorted(meta.get("shards", ())) or sorted(file.name for file in path.glob("*.bin"))
    for name in names:
        if not (path / name).exists():
            raise InputError(f"data folder {path} lacks the shard {name} that its {META} lists")
    chosen = choose_by_name(path, [path / name for name in names])
    train, val = chosen.train, chosen.val
    none_held_out = meta.get("tokens", {}).get("val") == 0
    if not val and len(train) > 1 and not none_held_out:
        train, val = train[1:], train[:1]
    remark = f"not read {listed(chosen.skipped)}" if chosen.skipped else ""
    return ShardSet([open_shard(p) for p in train], [open_shard(p) for p in val], meta, remark)


def _read_meta(folder: Path) -> dict[str, Any]:
    """Read meta.json; raises InputError where a field has another type or range."""
    meta = read_json(folder / META, types=META_TYPES)
    names, counts = meta["shards"], [*meta.get("bytes", {}).values(), meta.get("dropped_bytes")]
    if (
        names
        and all(isinstance(name, str) and name and Path(name).name == name for name in names)
        and 0 < meta["vocab_size"] <= MAX_VOCAB
        and all(count is None or (type(count) is int and count >= 0) for count in counts)
    ):
        return meta
    raise InputError(
        f"{folder / META} is not a shard description this version reads; run 'deeploop data' again"
    )


def check_hashes(shards: ShardSet, digests: dict[str, str]) -> int:
    """Compare the hashes of the tokens, by path, with those of meta.json; returns their number."""
    recorded = shards.meta.get("sha256", {})
    compared = 0
    for path, digest in digests.items():
        wanted = recorded.get(Path(path).name)
        if wanted is not None and wanted != digest:
            raise InputError(
                f"shard {path} has other tokens than were written to it (its checksum in {META} "
                "does not match); write or copy it again"
            )
        compared += wanted is not None
    return compared


def shard_dtype(vocab_size: int) -> str:
    """Return the narrower dtype of the two llm.c layouts that fits all ids < ``vocab_size``."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def write_shard(path: Path, blocks: Iterable[np.ndarray], dtype: str) -> tuple[int, str]:
    """Write one llm.c shard, complete or not at all, from blocks of ids.

    Returns the number of ids and the SHA-256 of the tokens in the file.
    """
    magic, (version, _) = next(item for item in LAYOUTS.items() if item[1][1] == dtype)
    header = np.zeros(HEADER_INTS, "<i4")
    count, digest = 0, hashlib.sha256()
    with atomic_file(path) as file:
        file.write(header.tobytes())
        for block in blocks:
            data = block.astype(dtype).tobytes()
            file.write(data)
            digest.update(data)
            count += len(block)
        header[:3] = magic, version, count
        file.seek(0)
        file.write(header.tobytes())
    return count, digest.hexdigest()


@contextmanager
def claimed_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder`` for writing, and mark it unfinished until the block inside succeeds.

    The folder must be new, empty, or left unfinished by an earlier attempt, whose shards
    are then removed. Where the block fails before it wrote a file, the folder is removed.
    """
    mark = folder / UNFINISHED
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output {folder} is a file; give a folder that is new or empty")
    if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
        raise InputError(f"output folder {folder} is not empty; give one that is new or empty")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output folder {folder} cannot be created ({error.strerror})") from error
    with exclusive(mark, wait=False) as locked:
        if locked is False:
            raise InputError(f"output folder {folder} is being written by another process; wait")
        for old in folder.iterdir():
            if REPLACEABLE.search(old.name):
                old.unlink()
        try:
            yield
        except BaseException:
            files = [file for file in folder.rglob("*") if file.is_file()]
            if all(file == mark or file.suffix == ".lock" for file in files):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        mark.unlink()
