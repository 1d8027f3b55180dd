"""Files are written completely or not at all."""

import errno
import os

import pytest

from deeploop.utils.disk import atomic_file, write_text
from tests.helpers.data import refused


def test_nothing_half_written_takes_the_name(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    refused(lambda: write_text(path, "half"), path, "No space left")
    assert list(tmp_path.iterdir()) == []


def test_other_errors_keep_their_traceback(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "none" / "x.bin"):
        pass
