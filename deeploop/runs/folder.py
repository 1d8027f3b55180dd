"""Choose and lock a run's folder; write and read config.json and corpus.json in it.

README.md beside this file lists the other files of a run.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deeploop.config import Config
from deeploop.data.corpus import Corpus
from deeploop.utils.disk import disk_errors, exclusive, user_path, write_json, write_text
from deeploop.utils.errors import InputError


def choose_run_folder(config: Config) -> Path:
    """Return the folder of a new run, not created yet; raises InputError if it is not empty."""
    name = config.train.out or f"runs/{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = user_path(name, "train.out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        onward = f", or go on with --resume {name}" if any(folder.glob("checkpoints/*")) else ""
        raise InputError(f"train.out={name!r}: already exists; choose another folder{onward}")
    return folder


@contextlib.contextmanager
def lock_run_folder(folder: Path, new: bool) -> Iterator[None]:
    """Create a run's folder if absent, and lock it against other processes.

    Raises InputError where it cannot be created, another process writes to it, or it
    should be `new` and is not empty.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"train.out={str(folder)!r}: cannot be created ({error.strerror})"
        ) from error
    with exclusive(folder, wait=False) as locked:
        if locked is False or (new and any(folder.iterdir())):
            raise InputError(
                f"train.out={str(folder)!r}: another process has started a run in it; "
                "wait for it or choose another folder"
            )
        yield


def read_corpus_file(folder: Path) -> dict[str, Any]:
    """Read corpus.json of a run; raises InputError where it is missing or damaged."""
    try:
        return dict(json.loads((folder / "corpus.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"run {folder}: corpus.json is not readable ({error})") from error


def corpus_identity(corpus: Corpus) -> dict[str, Any]:
    """Return token counts, fingerprints and hashes: they differ where two corpora differ.

    Fingerprints are of samples, hashes of every token of a stream that is not very long.

    A resumed run compares them with those of its corpus.json.
    """
    return {
        "train_tokens": len(corpus.train),
        "val_tokens": len(corpus.val),
        "fingerprint": [corpus.train.fingerprint(), corpus.val.fingerprint()],
        "content": [corpus.train.content(), corpus.val.content()],
    }


def write_run_files(folder: Path, config: Config, corpus: Corpus, floors: dict[str, float]) -> None:
    """Write config.json, corpus.json and the tokenizer's files.

    floors: by name, the nats per held-out token that n-gram counts reach.
    """
    with disk_errors(f"run folder {folder}"):
        spec = corpus.tokenizer.save(folder) if corpus.tokenizer else None
        write_text(folder / "config.json", config.to_json())
    write_json(
        folder / "corpus.json",
        {
            "name": corpus.name,
            "tokenizer": spec,
            "vocab_size": corpus.vocab_size,
            **corpus_identity(corpus),
            "floors_nats_per_token": floors,
        },
    )
