"""Show the progress of training: a live line in a terminal, a plain line per report elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from deeploop.utils.console import say


class _Report(ProgressColumn):
    """Show the trainer's last report: loss, speed and the time left."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("report", ""), no_wrap=True, overflow="ellipsis")


class ProgressBar:
    """Print one line of progress; use it as a context manager around the training loop."""

    def __init__(self, console: Console, steps: int, start: int):
        self.console = console
        self.bar = Progress(
            TextColumn("step {task.completed:>6}/{task.total}"),
            BarColumn(bar_width=8),
            _Report(),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
        )
        self.task = self.bar.add_task("train", total=steps, completed=start, report="")
        self.steps = steps

    def __enter__(self) -> "ProgressBar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def step(self, step: int) -> None:
        """Advance the bar to `step`."""
        self.bar.update(self.task, completed=step)

    def report(self, step: int, text: str) -> None:
        """Show the figures of a step."""
        self.bar.update(self.task, completed=step, report=text)
        if not self.console.is_terminal:
            self.say(f"step {step:>6}/{self.steps} {text}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        say(self.bar.console, text)
