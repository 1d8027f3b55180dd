"""deeploop eval: its options reach the evaluation, and its refusals are one sentence."""

import json

import pytest

from deeploop.cli import main
from deeploop.train.setup import open_run


def test_eval_prints_a_table_and_writes_its_files(config, quiet, tmp_path, capsys):
    config = config.replace("model", inject="add").replace("train", steps=1, eval_tokens=64)
    open_run(config, quiet).fit()
    run = str(tmp_path / "run")
    options = ["--tokens", "60", "--batch-size", "4", "--starts", "2", "--device", "cpu"]
    assert main(["eval", run, "--loops", "1..3", *options, "--out", str(tmp_path / "mine")]) == 0
    said = capsys.readouterr().out
    for word in ("60 held-out tokens through 3 loops", "trained 2", "cosine", "took     "):
        assert word in said
    figures = json.loads((tmp_path / "mine.json").read_text())
    assert figures["table"] == [1, 2, 3] and figures["tokens"] == 60
    assert (tmp_path / "mine.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["nowhere"], "no such folder"), ([], "RUN"), (["x", "--loop", "3"], "--loop")],
)
def test_bad_input_is_one_sentence(arguments, named, capsys):
    assert main(["eval", *arguments]) == 2
    said = capsys.readouterr().err
    assert named in said and said.startswith("deeploop eval: ")


def test_torchrun_is_refused(monkeypatch, capsys):
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    assert main(["eval", "run"]) == 2
    assert "takes one process" in capsys.readouterr().err
