"""Show text to the user: no print ends a run, and no text of a user controls the terminal.

Everything that a long command prints goes through this file.
"""

import os
import re
import sys
import textwrap
from contextlib import suppress
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDE = 1000  # columns: more than any table needs
# The C0 and C1 controls but for newline and tab, marks that reverse the direction of writing,
# and halves of surrogate pairs, which stand for bytes of a file name that are not UTF-8.
CONTROLS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Replace control characters by their escapes, such as \x1b; a line may end in \r\n."""
    ends = text.replace("\r\n", "\n")
    return CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), ends)


class DroppingStream:
    """Pass text to a stream, and drop it once the stream fails: its reader has gone or is full.

    rich raises SystemExit where a pipe has no reader, and Python exits with 120 where text
    cannot be flushed at the end; neither may cost a run its last steps.
    """

    def __init__(self, stream: TextIO):
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text, with question marks for what the stream's encoding lacks."""
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding
            self.write(text.encode(encoding, "replace").decode(encoding))
        except BlockingIOError:
            pass  # a slow reader: these words are lost, later ones may be read
        except (OSError, ValueError):
            send_to_null(self.stream)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self.stream.flush()
        except BlockingIOError:
            pass
        except (OSError, ValueError):
            send_to_null(self.stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def send_to_null(stream: TextIO) -> None:
    """Send what a stream's buffer holds, and all that follows, to the null device."""
    with suppress(OSError, ValueError):  # a closed stream, or one without a file
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
        stream.flush()


def open_console(quiet: bool = False) -> Console:
    """Return a console on standard output that never raises, for `say` and the progress bar."""
    if sys.stdout is None:  # the process was started with its output closed
        return Console(quiet=True)
    return Console(file=cast(IO[str], DroppingStream(sys.stdout)), quiet=quiet)


def redraws(console: Console) -> bool:
    """Return whether the console can redraw a line: not a file, a pipe or TERM=dumb."""
    return console.is_interactive and console.file.isatty()


def say(console: Console, text: str, indent: int | None = None) -> None:
    """Print a line in printable form, without markup, because text of a corpus may hold any.

    Args:
        console: where to.
        text: the line.
        indent: on a terminal, wrap between words and start further lines after so many columns.
            None leaves wrapping to the terminal, so that a long command can be copied.
    """
    text = printable(text)
    if indent is not None and console.file.isatty():
        text = textwrap.fill(
            text, console.width, subsequent_indent=" " * indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=True)


def say_error(text: str) -> None:
    """Print a line in printable form on standard error, where anything can be printed there."""
    if sys.stderr is not None:
        stream = DroppingStream(sys.stderr)
        stream.write(f"{printable(text)}\n")
        stream.flush()


def say_in_handler(text: str) -> None:
    """Print a line on standard error from a signal handler, which may use no lock or buffer."""
    if sys.__stderr__ is None:
        return
    with suppress(OSError, ValueError):
        handle = sys.__stderr__.fileno()
        # On a terminal the cursor may stand behind a progress line.
        start = "\n" if os.isatty(handle) else ""
        os.write(handle, f"{start}{text}\n".encode())


def print_generated(text: str) -> None:
    """Print generated text: as it is into a pipe or a file, in printable form on a terminal."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    print(printable(text) if terminal else text)


def print_whole(console: Console, table: Table) -> None:
    """Print a table at its full width: a narrow terminal wraps its lines, and no cell is cut."""
    options = console.options.update(max_width=WIDE)
    table.width = Measurement.get(console, options, table).maximum
    console.print(table, crop=False)
