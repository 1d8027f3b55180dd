"""Choose the tokenizer of token shards: the one that is asked for, or the one they name."""

from pathlib import Path
from typing import Any

from deeploop.data.characters import META_PICKLE
from deeploop.data.tokenizer import Tokenizer, load_tokenizer
from deeploop.utils.errors import InputError


def shard_tokenizer(source: Path, spec: str, meta: dict[str, Any]) -> tuple[Tokenizer | None, str]:
    """Load the tokenizer of shards, and a note where none could be loaded.

    Args:
        source: a shard or a folder of shards.
        spec: tokenizer asked for; "auto": the one that the shards name.
        meta: meta.json of the shards; empty: none.

    Presets ask for GPT-2's, which needs a network once: without one, shards still train.

    Raises:
        InputError: the tokenizer asked for cannot be loaded, or is not that of the shards.
    """
    named, note = _named_tokenizer(source, meta)
    if spec == "auto":
        return named, note
    try:
        given = load_tokenizer(spec)
    except InputError as error:
        if spec != "gpt2":
            raise
        return named, str(error)
    wanted = meta.get("vocab_size", named.vocab_size if named else given.vocab_size)
    fingerprint = meta.get("tokenizer_fingerprint") or (named.fingerprint if named else None)
    if given.vocab_size != wanted or (fingerprint and given.fingerprint != fingerprint):
        name = meta.get("tokenizer") or (named.name if named else "another")
        raise InputError(
            f"tokenizer {spec!r} has {given.vocab_size} ids, but the shards in {source} were "
            f"written with {name!r} of {wanted} ids; give --data.tokenizer auto to use that one"
        )
    return given, ""


def _named_tokenizer(source: Path, meta: dict[str, Any]) -> tuple[Tokenizer | None, str]:
    """Load the tokenizer of meta.json, or the characters of nanoGPT's meta.pkl."""
    folder = source if source.is_dir() else source.parent
    spec = meta.get("tokenizer")
    if spec is None and not meta and (folder / META_PICKLE).exists():
        spec = META_PICKLE
    if spec is None:
        return None, ""
    try:
        return load_tokenizer(spec, folder), ""
    except InputError as error:  # training on tokens needs no tokenizer
        return None, str(error)
