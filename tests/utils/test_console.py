"""Tables in narrow terminals."""

import io

from rich.console import Console
from rich.table import Table

from deeploop.utils.console import print_whole


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
