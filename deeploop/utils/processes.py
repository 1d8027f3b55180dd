"""Pools of worker processes that end with the process that started them."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection, get_context, parent_process


def worker_pool(
    workers: int | None = None, prepare: Callable[[], object] | None = None
) -> ProcessPoolExecutor:
    """Make a pool of spawned processes, which end even where their parent is killed.

    The workers of a plain ProcessPoolExecutor would wait for work for ever.

    Args:
        workers: Number of processes; None for one per CPU.
        prepare: Called once in each worker before any work.
    """
    return ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (prepare,))


def _start_worker(prepare: Callable[[], object] | None) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if prepare is not None:
        prepare()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "runs in workers alone"
    connection.wait([parent.sentinel])
    os._exit(1)
