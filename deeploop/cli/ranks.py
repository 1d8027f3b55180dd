"""Start the same work on every rank, or stop all of them, and let one rank say why."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn, TypeVar

from deeploop.utils.errors import Diverged, InputError
from deeploop.utils.launcher import place

if TYPE_CHECKING:
    from deeploop.utils.distributed import Ranks

T = TypeVar("T")


def is_main_process() -> bool:
    """Return whether torchrun's environment makes this process rank 0, or is absent."""
    return place().rank == 0


def on_every_rank(ranks: "Ranks", build: Callable[[], T]) -> T:
    """Run build() on every rank; if one rank fails, all stop.

    A rank that went on alone would wait for the others for ever.

    Raises:
        Exception: the one of build(), on the first rank where it failed.
        SystemExit: with code 2 and without a message, on the others.
    """
    result: T
    failure = None
    try:
        result = build()
    except Exception as error:
        failure = error
    first = ranks.first_rank(failure is not None)
    if first is None:
        return result
    if failure is not None and first == ranks.rank:
        raise failure
    raise SystemExit(2)


@contextlib.contextmanager
def refuse_together() -> Iterator[None]:
    """Raise an error that comes before the ranks join on the first rank that has one.

    The other ranks are in `on_every_rank`, or here too; they leave with it.
    """
    try:
        yield
    except InputError as error:
        refused = error
        if place().world > 1:
            from deeploop.utils.distributed import init_distributed

            def refuse() -> NoReturn:
                raise refused

            with init_distributed() as ranks:
                on_every_rank(ranks, refuse)
        raise


@contextlib.contextmanager
def one_speaks(ranks: "Ranks") -> Iterator[None]:
    """Leave without a message on a rank whose error the main rank or the ended one reports.

    Diverged is raised on every rank at once. A rank that ends for another reason breaks the
    connections of the others, and only the main rank of these says so.

    Raises:
        SystemExit: with code 1, in the place of such an error.
        InputError: on the main rank, where another rank ended.
    """
    try:
        yield
    except Diverged:
        if ranks.is_main:
            raise
        raise SystemExit(1) from None
    except RuntimeError as error:
        if ranks.world == 1 or not lost_connection(error):
            raise
        if not ranks.is_main:
            raise SystemExit(1) from None
        raise InputError(
            "another rank ended, so that this one cannot go on; its message, or torchrun's, says "
            "why; go on from the last checkpoint with --resume"
        ) from error


def lost_connection(error: RuntimeError) -> bool:
    """Return whether a message between ranks failed: gloo raises a plain RuntimeError for it."""
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or "gloo" in str(error)
