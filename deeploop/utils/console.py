"""Print to a terminal without cutting or interpreting the text."""

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDE = 1000  # columns: more than any table needs


def say(console: Console, text: str) -> None:
    """Print a line as it is: no wrapping, and no markup, because text of a corpus may hold any."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_whole(console: Console, table: Table) -> None:
    """Print a table at its full width: a narrow terminal wraps its lines, and no cell is cut."""
    options = console.options.update(max_width=WIDE)
    table.width = Measurement.get(console, options, table).maximum
    console.print(table, crop=False)
