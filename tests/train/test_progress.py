"""The progress line: redrawn in a terminal that can, else a line for each report."""

import io

import pytest
from rich.console import Console

from deeploop.train.progress import ProgressBar

FIGURES = [
    "loss 4.1234", "rms 12.34", "100.2 GiB", "1,234,567 tokens/s", "ETA 11:01:02", "lr 1.5e-03",
]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def watch(console, reports=3):
    with ProgressBar(console, 280, 0) as live:
        for step in range(1, reports + 1):
            live.step(step)
            live.report(step, FIGURES)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("stream", "environment"),
    [
        (io.StringIO, {}),
        (io.StringIO, {"FORCE_COLOR": "1", "TERM": "xterm"}),
        (Terminal, {"TERM": "dumb"}),
    ],
    ids=["file", "FORCE_COLOR into a file", "TERM=dumb"],
)
def test_a_plain_line_for_each_report_where_nothing_is_redrawn(stream, environment):
    console = Console(file=stream(), width=80, _environ=environment)
    lines = watch(console).splitlines()
    assert lines == [f"step {n:>6}/280 {'  '.join(FIGURES)}" for n in (1, 2, 3)]


@pytest.mark.parametrize("width", [80, 160])
def test_a_terminal_of_any_width_shows_loss_rms_and_memory(width):
    console = Console(file=Terminal(), width=width, _environ={"TERM": "xterm"})
    last = watch(console).split("\r")[-1]
    assert all(text in last for text in FIGURES[:4]) and "\u2026" not in last
    assert ("lr" in last) == (width == 160)


def test_a_long_validation_is_shown_until_it_ends():
    console = Console(file=Terminal(), width=80, _environ={"TERM": "xterm"})
    with ProgressBar(console, 280, 0) as live:
        live.report(1, FIGURES)
        live.validating(1000, 2000)
        live.bar.refresh()
        assert "validating: 1,000 of 2,000 tokens" in console.file.getvalue()
        live.validating(2000, 2000)
        live.bar.refresh()
    assert console.file.getvalue().count("validating") == 1
