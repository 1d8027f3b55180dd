"""Lines and tables are printed whole, as they are."""

import errno
import io
import os

import pytest
from rich.console import Console
from rich.table import Table

from deeploop.utils.console import (
    DroppingStream,
    open_console,
    print_generated,
    print_whole,
    printable,
    say,
    say_error,
    say_in_handler,
)


def test_a_table_wider_than_the_terminal_is_whole():
    console = Console(file=io.StringIO(), width=10)
    table = Table(box=None, pad_edge=False)
    for name in ("recompute", "gradient sums"):
        table.add_column(name)
    table.add_row("12345.6", "98765.4")
    print_whole(console, table)
    head, row = console.file.getvalue().splitlines()
    assert head.split("  ") == ["recompute", "gradient sums"]
    assert row.split() == ["12345.6", "98765.4"]


def test_a_line_is_printed_without_wrapping_or_markup():
    console = Console(file=io.StringIO(), width=10, force_terminal=True)
    say(console, "sample [bold]12345[/bold] [/x] of a text longer than the terminal")
    expected = "sample [bold]12345[/bold] [/x] of a text longer than the terminal\n"
    assert console.file.getvalue() == expected


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self):
        return True


class Failing(Terminal):
    """A stream whose reader has gone, or whose disk is full."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, text):
        raise self.error

    def flush(self):
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(errno.EPIPE, "Broken pipe"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "Input/output error"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        ValueError("I/O operation on closed file"),
    ],
    ids=lambda error: str(error),
)
def test_no_print_raises(error, monkeypatch):
    monkeypatch.setattr("sys.stdout", Failing(error))
    monkeypatch.setattr("sys.stderr", Failing(error))
    console = open_console()
    say(console, "a line")
    table = Table("a column")
    table.add_row("a cell")
    print_whole(console, table)
    say_error("an error")


def test_a_process_without_output_prints_nothing(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr("sys.__stderr__", None)
    say(open_console(), "a line")
    say_error("an error")
    say_in_handler("a signal")
    print_generated("text")


def test_what_is_left_in_the_buffer_of_a_broken_pipe_does_not_fail_at_exit():
    read, write = os.pipe()
    pipe = os.fdopen(write, "w")
    stream = DroppingStream(pipe)
    stream.write("before")
    os.close(read)
    stream.flush()
    stream.write("after")
    pipe.close()  # as Python does at its exit


def test_a_character_that_the_encoding_lacks_is_a_question_mark():
    raw = io.BytesIO()
    console = Console(file=DroppingStream(io.TextIOWrapper(raw, encoding="ascii")))
    say(console, "gro\u00df")
    assert raw.getvalue() == b"gro?\n"


def test_control_characters_are_shown_and_not_obeyed():
    r"""ESC, BEL, CR, DEL, C1, a reversal of the direction, half a surrogate pair."""
    text = "a\x1b[2J\x07\r\x7f\x9b\u202e\udcff"
    assert printable(text) == r"a\x1b[2J\x07\r\x7f\x9b\u202e\udcff"
    kept = "tab\t, caf\u00e9, \u00a0, \u200d and\nlines"
    assert printable(kept) == kept and printable("a\r\nb") == "a\nb"


def test_everything_said_is_printable(capfd):
    say(open_console(), "file \x1b]0;title\x07")
    say_error("no such file \x1b[2J")
    said = capfd.readouterr()
    assert said.out == "file \\x1b]0;title\\x07\n" and said.err == "no such file \\x1b[2J\n"


def test_text_in_colons_is_no_emoji():
    console = Console(file=io.StringIO())
    say(console, "a:bomb:b")
    assert console.file.getvalue() == "a:bomb:b\n"


@pytest.mark.parametrize(
    ("stream", "shown"), [(Terminal, "a\\x1b[2J\n"), (io.StringIO, "a\x1b[2J\n")]
)
def test_generated_text_is_raw_only_into_a_file(stream, shown, monkeypatch):
    monkeypatch.setattr("sys.stdout", stream())
    import sys

    print_generated("a\x1b[2J")
    assert sys.stdout.getvalue() == shown


def test_a_terminal_breaks_a_header_line_between_words():
    line = "model    " + "deeploop-tiny: width 128, 935,168 parameters, " * 3
    console = Console(file=Terminal(), width=40)
    say(console, line, indent=9)
    lines = console.file.getvalue().splitlines()
    assert len(lines) > 2 and all(len(x) <= 40 for x in lines)
    assert all(x.startswith(" " * 9) and x[9] != " " for x in lines[1:])
    assert " ".join(" ".join(lines).split()) == " ".join(line.split())
    console = Console(file=io.StringIO(), width=40)
    say(console, line, indent=9)
    assert console.file.getvalue() == line + "\n"
