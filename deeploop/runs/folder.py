"""A run's folder: what is written beside the checkpoints, and the live progress line.

config.json     the resolved configuration
corpus.json     the corpus, its tokenizer and its n-gram floors
metrics.jsonl   a line each log_every steps and each validation
summary.json    the end of the run, or of its newest part
loss.png        training and held-out loss
loops.png       the stream, and the experts' loads, loop by loop
checkpoints/    see deeploop.runs.checkpoint
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
    """The folder of a new run, not made yet; raises InputError where it holds something."""
    name = config.train.out or f"runs/{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = user_path(name, "train.out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        onward = f", or go on with --resume {name}" if any(folder.glob("checkpoints/*")) else ""
        raise InputError(f"train.out={name!r}: already exists; choose another folder{onward}")
    return folder


@contextlib.contextmanager
def lock_run_folder(folder: Path, new: bool) -> Iterator[None]:
    """Hold a run's folder, made where there is none, alone among processes.

    Raises InputError where it cannot be made, or another run is or has been there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"train.out={str(folder)!r}: cannot be made ({error.strerror})") from error
    with exclusive(folder, wait=False) as held:
        if held is False or (new and any(folder.iterdir())):
            raise InputError(
                f"train.out={str(folder)!r}: another process has begun a run there; "
                "wait for it or choose another folder"
            )
        yield


def read_corpus_file(folder: Path) -> dict[str, Any]:
    """corpus.json of a run; raises InputError where it is missing or torn."""
    try:
        return dict(json.loads((folder / "corpus.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"run {folder}: corpus.json is not readable ({error})") from error


def corpus_identity(corpus: Corpus) -> dict[str, Any]:
    """What tells a corpus from another, or from itself after a change."""
    return {
        "train_tokens": len(corpus.train),
        "val_tokens": len(corpus.val),
        "fingerprint": [corpus.train.fingerprint(), corpus.val.fingerprint()],
    }


def write_run_files(folder: Path, config: Config, corpus: Corpus, floors: dict[str, float]) -> None:
    """Write what the run is of: config.json and corpus.json, and the tokenizer's files."""
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
