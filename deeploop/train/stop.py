"""Collect the signals that ask a run to stop, so that it stops between two steps."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from deeploop.utils.console import say_in_handler

PATIENCE = 2.0  # seconds after a signal before a second SIGINT means it


@contextlib.contextmanager
def stop_signals(task: str, announce: bool = True) -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP, and say at the first one that it was heard.

    SIGHUP says that the terminal was closed; where it is ignored, as under nohup, it stays so.

    A second SIGINT raises KeyboardInterrupt, but not one within 2 seconds of the first:
    torchrun sends its ranks a SIGINT, then a SIGTERM, and timeout sends both to both.

    Args:
        task: is finished before the run stops; for the message.
        announce: False on ranks that do not print.

    Yields:
        The list of the signals received, empty so far; it stays empty outside the main thread.
    """
    received: list[int] = []
    first = 0.0

    def note(number: int, frame: object) -> None:
        nonlocal first
        if received and number == signal.SIGINT and time.monotonic() - first > PATIENCE:
            raise KeyboardInterrupt
        received.append(number)
        if len(received) > 1:
            return
        first = time.monotonic()
        if announce:
            say_in_handler(
                f"{signal.Signals(number).name}: stopping after {task}; Ctrl-C again, "
                f"{PATIENCE:.0f} s from now or later, stops at once and saves nothing more"
            )

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    wanted = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        wanted.append(signal.SIGHUP)
    before = {s: signal.signal(s, note) for s in wanted}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
