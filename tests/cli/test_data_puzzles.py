"""`deeploop data sudoku|maze|arc` writes a set and says what is in it."""

import pytest

from deeploop.cli import main
from deeploop.data.puzzles import open_puzzles
from tests.helpers.puzzles import write_tasks

SUDOKU = ["sudoku", "set", "--size", "4", "--puzzles", "20", "--test", "5", "--givens", "5-7"]


def test_sets_are_written_and_described(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *SUDOKU, "--augment", "2", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "train of set: 20 puzzles" in said and "test of set: 5 puzzles" in said
    assert main(["data", "maze", "mazes", "--side", "7", "--puzzles", "4", "--test", "2"]) == 0
    assert open_puzzles("mazes", "train").seq_len == 49
    write_tasks(tmp_path / "tasks")
    assert main(["data", "arc", "tasks", "arc", "--augment", "2"]) == 0
    assert open_puzzles("arc", "test").groups_count == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rating", "3"], "rating=3: needs --csv"),
        (["--csv", "here", "--givens", "30"], "givens=30: has no effect with --csv"),
        (["--csv", "here", "--size", "6"], "size: boards of --csv have 9 rows"),
        (["--size", "5"], "size=5: must be one of 4, 6, 9"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "sudoku", "set", *options]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_set_is_not_written_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *SUDOKU]) == 0
    assert main(["data", *SUDOKU]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_text_of_such_a_name_is_tokenised_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "maze").write_text("a text " * 100)
    assert main(["data", "./maze", "shards", "--tokenizer", "byte"]) == 0
    assert (tmp_path / "shards" / "meta.json").exists()
