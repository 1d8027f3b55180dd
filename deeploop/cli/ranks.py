"""Start the same work on every rank, or stop all of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from deeploop.utils.errors import InputError

if TYPE_CHECKING:
    from deeploop.train.trainer import Trainer
    from deeploop.utils.distributed import Ranks


def on_every_rank(ranks: "Ranks", build: Callable[[], "Trainer"]) -> "Trainer | None":
    """Run build() on every rank; if one rank raises InputError, all stop.

    A rank that went on alone would wait for the others for ever.

    Returns:
        The trainer; None where another rank raised.
    """
    trainer, refusal = None, None
    try:
        trainer = build()
    except InputError as error:
        refusal = error
    if ranks.any_rank(refusal is not None):
        if trainer is not None:
            trainer.lock.close()
        if refusal is not None:
            raise refusal
        return None
    return trainer
