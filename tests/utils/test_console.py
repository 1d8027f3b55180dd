"""Lines and tables are printed whole, as they are."""

import io

from rich.console import Console
from rich.table import Table

from deeploop.utils.console import print_whole, say


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
