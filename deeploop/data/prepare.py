"""Write a corpus as llm.c token shards (`deeploop data`)."""

import shutil
from pathlib import Path
from typing import Any

from deeploop.data.corpus import Corpus, load_corpus
from deeploop.data.shards import META, claimed_folder, shard_dtype, write_shard
from deeploop.data.token_cache import Progress
from deeploop.utils.disk import disk_errors, user_path, write_json
from deeploop.utils.errors import InputError

STAGING = ".staging"  # cache folder for the tokens of text, inside the output folder


def prepare(
    input: str,
    out: str,
    tokenizer: str = "auto",
    text_field: str = "text",
    val_fraction: float = 0.1,
    shard_tokens: int = 100_000_000,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the corpus at ``input`` to the folder ``out`` as llm.c shards; returns meta.json.

    The streams are those of ``load_corpus``: ``NAME_val_000000.bin``, … has val,
    ``NAME_train_000001.bin``, … has train, and meta.json, written last, names the
    tokenizer, the counts and the checksum of each shard. The returned dict also has the
    corpus's remark as "note". After a kill, the same call again completes the folder
    without tokenising the text a second time; until then the folder is marked
    unfinished and cannot be trained on.

    Args:
        input, tokenizer, text_field, val_fraction: as in ``load_corpus``.
        shard_tokens: tokens of each shard but the last of a split.

    Raises:
        InputError: for anything refused, and on a full disk.
    """
    if not 1 <= shard_tokens < 1 << 31:
        raise InputError(f"shard_tokens is {shard_tokens}; it must lie in 1 .. 2^31 - 1")
    if not user_path(input, "data path").exists() and input:
        raise InputError(f"data path {input!r} does not exist; give a file or folder that does")
    folder = user_path(out, "output folder")
    name = Path(input).resolve().stem if input else "topics"
    with disk_errors(f"output folder {folder}", folder), claimed_folder(folder):
        staging = folder / STAGING
        corpus = load_corpus(
            input,
            tokenizer,
            text_field=text_field,
            val_fraction=val_fraction,
            cache_dir=str(staging),
            progress=progress,
        )
        meta = _write_corpus(corpus, folder, name, shard_tokens, progress)
        meta["note"] = corpus.note
        shutil.rmtree(staging, ignore_errors=True)
    return meta


def _write_corpus(
    corpus: Corpus, folder: Path, name: str, shard_tokens: int, progress: Progress | None
) -> dict[str, Any]:
    hashes: dict[str, str] = {}
    done, total = 0, len(corpus.train) + len(corpus.val)
    # Validation first, as in llm.c, for readers that take the first shard for it.
    for split, stream in (("val", corpus.val), ("train", corpus.train)):
        for chunk in stream.chunks(shard_tokens):
            shard = f"{name}_{split}_{len(hashes):06d}.bin"
            dtype = shard_dtype(corpus.vocab_size)
            count, hashes[shard] = write_shard(folder / shard, chunk.blocks(), dtype)
            done += count
            if progress:
                progress("write", done, total)
    meta = {
        "shards": list(hashes),
        "sha256": hashes,
        "tokenizer": corpus.tokenizer.save(folder) if corpus.tokenizer else None,
        "tokenizer_fingerprint": corpus.tokenizer.fingerprint if corpus.tokenizer else None,
        "vocab_size": corpus.vocab_size,
        "tokens": {"train": len(corpus.train), "val": len(corpus.val)},
        "bytes": {"train": corpus.train_bytes, "val": corpus.val_bytes},
        "dropped_bytes": corpus.dropped_bytes,
    }
    write_json(folder / META, meta)
    return meta
