"""Fields of the data: a task takes the place of a text, and its difficulties are read."""

import pytest

from deeploop.config import Config, DataConfig
from deeploop.config.data import TASKS, difficulties
from tests.helpers.data import refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task": "sorting"}, ("data.task='sorting'", "parity", "reach")),
        ({"task": "parity", "path": "a.txt"}, ("data.task=parity", "data.path='a.txt'")),
        ({"difficulty": "3"}, ("data.difficulty='3'", "data.task")),
        ({"eval_difficulty": "3"}, ("data.eval_difficulty='3'", "data.task")),
        ({"task": "reach", "difficulty": "4-1"}, ("data.difficulty='4-1'", "from 1 to 23")),
        ({"task": "reach", "difficulty": "0-4"}, ("data.difficulty='0-4'",)),
        ({"task": "reach", "difficulty": "1-24"}, ("data.difficulty='1-24'",)),
        ({"task": "reach", "eval_difficulty": "24"}, ("data.eval_difficulty='24'",)),
        ({"task": "reach", "eval_difficulty": "1,2"}, ("data.eval_difficulty='1,2'",)),
        ({"task": "reach", "difficulty": "²"}, ("data.difficulty",)),
        ({"task": "reach", "difficulty": "1" * 5000}, ("data.difficulty",)),
    ],
)
def test_what_is_no_task_or_no_difficulty_is_refused(fields, words):
    refused(lambda: DataConfig(**fields), *words)


def test_difficulties_are_a_number_or_a_range():
    assert list(difficulties("d", "3", 9)) == [3]
    assert list(difficulties("d", "1-4", 9)) == [1, 2, 3, 4]
    data = DataConfig(task="reach", difficulty="2-3")
    assert (data.train_difficulties, data.eval_difficulties) == (range(2, 4), range(12, 13))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_difficulties_of_its_own(name):
    data = DataConfig(task=name)
    assert max(data.train_difficulties) < max(data.eval_difficulties)


def test_a_configuration_without_these_fields_still_loads():
    values = Config().to_json()
    for name in ("task", "difficulty", "eval_difficulty"):
        values = values.replace(f'"{name}": "",\n    ', "").replace(f',\n    "{name}": ""', "")
    assert "task" not in values and Config.from_json(values) == Config()
