"""Fields of the corpus, and the values of `data.task`."""

import re
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from deeploop.config.fields import FRACTION, MAY_CHANGE, check_choice, check_fields, flag
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief


class TaskChoice(NamedTuple):
    """One value of `data.task`: its class, and its difficulties."""

    task: str  # "module:Class", a subclass of deeploop.data.tasks.base.Task
    train: str  # default of data.difficulty
    hard: str  # default of data.eval_difficulty
    most: int  # the largest difficulty


# The registry of generated tasks. A new task is a file in deeploop/data/tasks/ and a line here.
TASKS = {
    "reach": TaskChoice("deeploop.data.tasks.reach:Reach", "1-4", "12", most=23),
    "phop": TaskChoice("deeploop.data.tasks.phop:PHop", "1-4", "8", most=12),
    "addition": TaskChoice("deeploop.data.tasks.addition:Addition", "1-4", "6", most=64),
    "parity": TaskChoice("deeploop.data.tasks.parity:Parity", "1-8", "16", most=4096),
    "maze": TaskChoice("deeploop.data.tasks.maze:Maze", "1-4", "8", most=8),
    "regression": TaskChoice("deeploop.data.tasks.regression:Regression", "1-2", "3", most=16),
}


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from.

    A resumed run may name another place of the same text: the tokens are compared.
    """

    path: Annotated[
        str,
        flag(
            "text, .jsonl, .csv, .parquet (also .gz, .zst), or a file or folder of .bin token "
            "shards; empty: the help topics every CPython ships",
            "--data",
        ),
        MAY_CHANGE,
    ] = ""
    tokenizer: Annotated[
        str,
        flag(
            "auto (byte for text, for shards the one they name), byte, gpt2, gpt2:DIR with "
            "vocab.json and merges.txt, or a tokenizer.json"
        ),
        MAY_CHANGE,
    ] = "auto"
    text_field: Annotated[str, flag("field or column that holds the text"), MAY_CHANGE] = "text"
    val_fraction: Annotated[
        float,
        flag("fraction of a text corpus held out, from its end, where no file is called val"),
        FRACTION,
        MAY_CHANGE,
    ] = 0.1
    verify: Annotated[
        bool, flag("compare checksums of cached text and shards of any size"), MAY_CHANGE
    ] = False

    task: Annotated[
        str,
        flag(
            "a generated task in the place of a text; empty: none",
            choices=TASKS,
        ),
    ] = ""
    difficulty: Annotated[
        str, flag("difficulties of the task in training, such as 3 or 1-4; empty: the task's own")
    ] = ""
    eval_difficulty: Annotated[
        str,
        flag("difficulties of the held-out examples of the task; empty: its own, harder ones"),
        MAY_CHANGE,
    ] = ""

    puzzles: Annotated[
        str,
        flag(
            "puzzles in the place of a text: a folder of `deeploop data`, HRM or TRM, or "
            "sudoku-4x4, sudoku-6x6 or maze-9x9, which are generated; empty: none"
        ),
        MAY_CHANGE,
    ] = ""

    def __post_init__(self) -> None:
        check_fields(self, "data.")
        if self.puzzles and (self.task or self.path):
            raise InputError(
                f"data.puzzles={brief(repr(self.puzzles))}: takes the place of a text and of a "
                "task; leave out data.path and data.task"
            )
        if not self.task:
            for name in ("difficulty", "eval_difficulty"):
                if value := getattr(self, name):
                    raise InputError(f"data.{name}={brief(repr(value))}: needs a data.task")
            return
        check_choice("data.task", self.task, TASKS)
        if self.path:
            raise InputError(
                f"data.task={self.task}: takes the place of a text; leave out "
                f"data.path={brief(repr(self.path))}"
            )
        _ = self.train_difficulties, self.eval_difficulties  # refused here where they are none

    @property
    def train_difficulties(self) -> range:
        """The task's difficulties in training."""
        return difficulties(
            "data.difficulty", self.difficulty or TASKS[self.task].train, TASKS[self.task].most
        )

    @property
    def eval_difficulties(self) -> range:
        """The task's difficulties in validation."""
        return difficulties(
            "data.eval_difficulty",
            self.eval_difficulty or TASKS[self.task].hard,
            TASKS[self.task].most,
        )


def difficulties(field: str, text: str, most: int) -> range:
    """Read a difficulty such as 3, or the first and the last of a range such as 1-4.

    Raises InputError, naming the field, for anything else and for numbers outside of [1, most].
    """
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= most:
        raise InputError(
            f"{field}={brief(repr(text))}: must be a number such as 3, or a range such as 1-4, from"
            f" 1 to {most}"
        )
    return range(first, last + 1)
