"""The variables by which torchrun tells each process its place; no torch is imported."""

import os
from typing import NamedTuple

from deeploop.utils.errors import InputError

REMEDY = "start with torchrun, which sets all of them, or unset them"


class Place(NamedTuple):
    """One process among those that a launcher started together."""

    rank: int = 0  # of `world`
    local_rank: int = 0  # on its machine; also the index of its GPU
    world: int = 1


def place() -> Place:
    """Read this process's place from RANK, LOCAL_RANK and WORLD_SIZE.

    An empty variable is an unset one. Without any of them the process is alone.

    Raises:
        InputError: one of them is not a number in its range, or some are set without those
            that belong to them (MASTER_ADDR and MASTER_PORT where WORLD_SIZE is over 1).
    """
    world = whole("WORLD_SIZE", 1, 2**31 - 1)
    if world is None:
        alone = [name for name in ("RANK", "LOCAL_RANK") if os.environ.get(name)]
        if alone:
            raise InputError(f"{' and '.join(alone)} set without WORLD_SIZE: {REMEDY}")
        return Place()
    needed = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if world > 1 else ()
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise InputError(f"WORLD_SIZE={world} set without {', '.join(missing)}: {REMEDY}")
    if world > 1:
        whole("MASTER_PORT", 0, 65535)
    rank, local_rank = (whole(name, 0, world - 1) or 0 for name in ("RANK", "LOCAL_RANK"))
    return Place(rank, local_rank, world)


def whole(name: str, least: int, most: int) -> int | None:
    """Return an environment variable as a whole number; None if it is unset or empty.

    Raises InputError if it is no whole number from `least` to `most`.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
        raise InputError(
            f"{name}={text[:40]!r}: must be a whole number from {least} to {most}; {REMEDY}"
        )
    return int(text)
