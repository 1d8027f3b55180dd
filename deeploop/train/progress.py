"""Show the progress of training: a live line in a terminal, a plain line per report elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from deeploop.utils.console import redraws, say

BAR = 8  # columns of the bar
NARROW = 100  # columns, below which the line has no bar


class _Report(ProgressColumn):
    """Show the trainer's last report: loss, speed and the time left."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("report", ""), no_wrap=True, overflow="ellipsis")


class ProgressBar:
    """Print one line of progress; use it as a context manager around the training loop."""

    def __init__(self, console: Console, steps: int, start: int):
        self.console, self.steps = console, steps
        self.live = redraws(console)
        bar = [BarColumn(bar_width=BAR)] if console.width >= NARROW else []
        self.room = console.width - len(self.step_text(start)) - 1 - (BAR + 1 if bar else 0)
        self.bar = Progress(
            TextColumn("step {task.completed:>6}/{task.total}"),
            *bar,
            _Report(),
            console=console,
            disable=not self.live,
            refresh_per_second=4,
        )
        self.task = self.bar.add_task("train", total=steps, completed=start, report="")
        self.shown = ""  # the last report

    def __enter__(self) -> "ProgressBar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step_text(self, step: int) -> str:
        """Return the beginning of a line of progress."""
        return f"step {step:>6}/{self.steps}"

    def step(self, step: int) -> None:
        """Advance the bar to `step`."""
        self.bar.update(self.task, completed=step)

    def report(self, step: int, figures: list[str]) -> None:
        """Show the figures of a step, the most important first: a live line drops the last ones."""
        if not self.live:
            self.say(f"{self.step_text(step)} {'  '.join(figures)}")
        while len("  ".join(figures)) > self.room and len(figures) > 1:
            figures = figures[:-1]
        self.shown = "  ".join(figures)
        self.bar.update(self.task, completed=step, report=self.shown)

    def validating(self, done: int, total: int) -> None:
        """Show in the live line how many held-out tokens of a validation are read."""
        text = f"validating: {done:,} of {total:,} tokens" if done < total else self.shown
        self.bar.update(self.task, report=text)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        say(self.console, text)
