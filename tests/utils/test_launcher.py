"""A process's place among its ranks, read from the variables of torchrun."""

import pytest

from deeploop.cli import main
from deeploop.utils.errors import InputError
from deeploop.utils.launcher import Place, place

FULL = {
    "RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """Set torchrun's variables, and those given, and no other."""

    def set_variables(variables):
        for name in FULL:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Place(0, 0, 1)),
        (dict.fromkeys(FULL, ""), Place(0, 0, 1)),
        ({"MASTER_ADDR": "node1"}, Place(0, 0, 1)),
        ({"WORLD_SIZE": "1"}, Place(0, 0, 1)),
        (FULL, Place(1, 0, 2)),
    ],
)
def test_an_empty_variable_is_an_unset_one(launched, variables, expected):
    launched(variables)
    assert place() == expected


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc': must be a whole number from 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE='-2'"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0'"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9999"),
        ({"WORLD_SIZE": "\u0662"}, "WORLD_SIZE="),
        ({"RANK": "0"}, "RANK set without WORLD_SIZE"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "RANK and LOCAL_RANK set without WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "set without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: start with"),
        (FULL | {"MASTER_ADDR": ""}, "WORLD_SIZE=2 set without MASTER_ADDR: start with"),
        (FULL | {"MASTER_PORT": "http"}, "MASTER_PORT='http': must be a whole number from 0"),
        (FULL | {"RANK": "2"}, "RANK='2': must be a whole number from 0 to 1;"),
        ({"WORLD_SIZE": "1", "RANK": "3"}, "RANK='3': must be a whole number from 0 to 0;"),
    ],
)
def test_half_set_or_wrong_variables_are_one_sentence(launched, variables, words):
    launched(variables)
    with pytest.raises(InputError, match=words) as refusal:
        place()
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("verb", ["train", "profile", "diagnose"])
def test_a_verb_refuses_them(verb, launched, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    launched({"WORLD_SIZE": "two"})
    assert main([verb]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"deeploop {verb}: WORLD_SIZE='two'") and error.count("\n") == 1
    assert not any(tmp_path.iterdir())
