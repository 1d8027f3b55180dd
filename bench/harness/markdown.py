"""Tables and numbers as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int) -> str:
    """Format a table whose first `text_columns` columns are text and the others numbers."""
    alignment = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, alignment, *rows))


def mean_and_range(values: Sequence[float], digits: str = ".3f") -> str:
    """Format "mean (lowest to highest)"; one value is written alone, none as an empty string."""
    if len(values) < 2:
        return f"{values[0]:{digits}}" if values else ""
    low, high = min(values), max(values)
    return f"{statistics.mean(values):{digits}} ({low:{digits}} to {high:{digits}})"


def lowest_to_highest(values: Iterable[float]) -> str:
    """Format "lowest to highest" with four digits, or one number where they look the same."""
    texts = sorted({f"{value:.4g}" for value in values}, key=float)
    return " to ".join([texts[0], *texts[1:][-1:]])


def percent(value: float | None) -> str:
    """Format a share as a whole percentage; None as "-"."""
    return "-" if value is None else f"{value:.0%}"


def number(value: float | None, scale: float = 1.0) -> str:
    """Format value * scale with three digits, or all digits before the point; None as "-"."""
    if value is None:
        return "-"
    value *= scale
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
