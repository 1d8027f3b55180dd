"""Generated algorithmic tasks with a difficulty: a file for each, registered in `config.data`."""

import importlib

from deeploop.config.data import TASKS
from deeploop.config.fields import check_choice
from deeploop.data.tasks.base import Task

__all__ = ["Task", "load_task"]


def load_task(name: str) -> Task:
    """Make the task of a name in `deeploop.config.data.TASKS`; raises InputError for others."""
    check_choice("task", name, TASKS)
    module, _, kind = TASKS[name].task.partition(":")
    return getattr(importlib.import_module(module), kind)()
