"""deeploop compare: one table and one picture of runs, also of runs that have not ended."""

import json

import pytest

from deeploop.analyze.compare import differing, read_runs
from deeploop.cli import main
from deeploop.config import Config
from tests.helpers.data import refused


@pytest.fixture
def runs(config, tmp_path):
    """Folders of two runs that differ in loops and learning rate; the second has not begun."""
    folders = []
    for i, loops in enumerate((2, 3)):
        folder = tmp_path / str(i) / "run"
        folder.mkdir(parents=True)
        one = config.replace("model", loops=loops, vocab_size=256)
        one = one.replace("train", lr=1e-3 * (i + 1), out=str(folder))
        (folder / "config.json").write_text(one.to_json())
        folders.append(str(folder))
    lines = [
        {"step": 1, "loss": 5.0, "tokens_per_second": 900, "memory_gib": 0.5},
        {"step": 2, "loss": 4.0, "tokens_per_second": 1200, "memory_gib": 0.75},
        {"step": 2, "val_loss": 4.5, "val_bits_per_byte": 6.25},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "0" / "run" / "metrics.jsonl").write_text(text)
    return folders


def test_figures_and_the_fields_that_differ_are_in_one_table(
    runs, capsys, tmp_path, monkeypatch, pictures
):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *runs]) == 0
    said = capsys.readouterr().out
    rows = {line[:26].strip(): line[26:].split() for line in said.splitlines()}
    assert rows["held-out loss, nats/token"] == ["4.5000", "-"]
    assert rows["held-out bits/byte"] == ["6.2500", "-"]
    assert rows["tokens/s"] == ["1,200", "-"] and rows["peak memory, GiB"] == ["0.75", "-"]
    assert rows["parameters"][0] == rows["parameters"][1]
    assert rows["model.loops"] == ["2", "3"] and rows["train.lr"] == ["0.001", "0.002"]
    assert set(differing(read_runs(runs))) == {"model.loops", "train.lr"}
    assert "0/run" in said  # two folders of one name are told by their paths
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_one_run_and_many_are_drawn(runs, capsys, tmp_path, pictures):
    for count in (1, 12):
        out = tmp_path / f"{count}.png"
        assert main(["compare", *runs[:1] * count, "--out", str(out)]) == 0
        assert out.stat().st_size > 1000


def test_what_is_not_a_run_is_refused(tmp_path, capsys):
    refused(lambda: read_runs([str(tmp_path)]), "config.json", tmp_path)
    (tmp_path / "config.json").write_text('{"model": 3}')
    refused(lambda: read_runs([str(tmp_path)]), tmp_path)
    assert Config() and main(["compare"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
