"""Prepare a run on every rank, and refuse it where the ranks would not train the same."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deeploop.config import Config
from deeploop.config.fields import entries
from deeploop.data.source import Source
from deeploop.runs.checkpoint import Checkpoint
from deeploop.train.parents import Parents
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief

PLACES = {"train.out", "train.device", "data.path"}  # may differ between machines


@dataclass(frozen=True)
class Start:
    """All that a run starts from; `new` is False where it goes on in the checkpoint's folder."""

    config: Config
    corpus: Source
    ckpt: Checkpoint | None
    folder: Path
    new: bool
    parents: Parents

    def facts(self) -> dict[str, Any]:
        """Return by name what must be the same on every rank."""
        fields = {e.name: e.value for e in entries(self.config) if e.name not in PLACES}
        corpus = {f"the corpus's {name}": value for name, value in self.corpus.identity().items()}
        step = 0 if self.ckpt is None else self.ckpt.step
        return fields | corpus | {"the checkpoint's step": step} | self.parents.facts()


def prepare_together(ranks: Ranks, prepare: Callable[[], Start]) -> Start:
    """Run prepare() on every rank and compare what each is about to train.

    Returns:
        The start, with the main rank's folder.

    Raises:
        InputError: on every rank, what one raised, or the first field that differs.
    """
    if ranks.world == 1:
        return prepare()
    start: Start | None = None
    failure: Exception | None = None
    try:
        start = prepare()
    except Exception as error:  # of any kind: the other ranks wait in `gather`
        failure = error
    mine = ({}, Path(), str(failure)) if start is None else (start.facts(), start.folder, "")
    every = ranks.gather(mine)
    for rank, (facts, _, reason) in enumerate(every):
        if not facts:
            raise failure or InputError(f"rank {rank}: {reason}")
    main, folder, _ = every[0]
    for rank, (facts, _, _) in enumerate(every):
        for name, value in facts.items():
            if main[name] != value:
                raise InputError(
                    f"{name}: {brief(main[name])} on rank 0, {brief(value)} on rank {rank}; "
                    "start every rank with the same options, corpus and checkpoint"
                )
    assert start is not None
    return dataclasses.replace(start, folder=folder)
