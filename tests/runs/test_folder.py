"""A run's folder: locked with and without locks of the file system, cleared after a kill."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from deeploop.runs.folder import (
    check_new,
    clear_unfinished,
    lock_run_folder,
    read_corpus_file,
)
from deeploop.utils.disk import cache_folder, write_text
from tests.helpers.data import refused


@pytest.fixture
def no_locks(monkeypatch):
    """A file system without locks, as some network ones are."""

    def fails(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fails)


def test_a_file_stands_for_a_lock_where_there_is_none(no_locks, tmp_path):
    run = tmp_path / "run"
    with lock_run_folder(run, new=True) as locked:
        assert locked is False
        again = lock_run_folder(run, new=False)
        refused(again.__enter__, f"process {os.getpid()} on", "no locks", f"delete {run / '.lock'}")
    assert not (run / ".lock").exists()
    with lock_run_folder(run, new=True):
        pass


def test_what_a_killed_process_left_does_not_fill_a_folder(config, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".config.json.abc.tmp").write_text("{")
    check_new(run)
    clear_unfinished(run)
    assert list(run.iterdir()) == []
    (run / "mine").write_text("")
    refused(lambda: check_new(run), "already exists")
    refused(lambda: check_new(run, config), "already exists")


def test_a_run_without_checkpoint_begins_again_unless_it_is_another(config, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    write_text(run / "config.json", config.to_json())
    check_new(run, config.replace("train", out="elsewhere", device="auto"))
    other = config.replace("train", lr=0.5)
    refused(lambda: check_new(run, other), "train.lr=0.0015 began in it", "has 0.5", "another")
    (run / "checkpoints" / "step_000010").mkdir(parents=True)
    refused(lambda: check_new(run, config), "already exists", f"--resume {run}")


@pytest.mark.parametrize("text", ["[]", '{"tokenizer": 3}', '{"tokenizer": {}}', "{" * 10**5, ""])
def test_a_damaged_corpus_file_is_one_sentence(tmp_path, text):
    (tmp_path / "corpus.json").write_text(text)
    refused(lambda: read_corpus_file(tmp_path), tmp_path, "corpus.json")


def test_a_user_without_a_home_has_a_cache_folder(monkeypatch, tmp_path):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_folder().parent == tmp_path
