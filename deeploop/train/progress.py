"""Show the progress of training: a live line in a terminal, a plain line per report elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text


class _Rest(ProgressColumn):
    """What the trainer last reported, and the time the rest takes at the measured speed."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("report", ""), no_wrap=True, overflow="ellipsis")


class ProgressBar:
    """The progress line: a live one in a terminal, a plain line a report elsewhere."""

    def __init__(self, console: Console, steps: int, start: int):
        self.console = console
        self.bar = Progress(
            TextColumn("step {task.completed:>6}/{task.total}"),
            BarColumn(bar_width=8),
            _Rest(),
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
        self.bar.update(self.task, completed=step)

    def report(self, step: int, text: str) -> None:
        self.bar.update(self.task, completed=step, report=text)
        if not self.console.is_terminal:
            self.say(f"step {step:>6}/{self.steps} {text}")

    def say(self, text: str) -> None:
        self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
