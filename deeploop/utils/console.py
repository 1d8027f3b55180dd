"""What the commands print that a terminal must not cut."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDE = 1000  # columns that no table needs


def print_whole(console: Console, table: Table) -> None:
    """A table as wide as it is: a narrow terminal wraps its lines, and no figure is cut."""
    options = console.options.update(max_width=WIDE)
    table.width = Measurement.get(console, options, table).maximum
    console.print(table, crop=False)
