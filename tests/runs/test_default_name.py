"""The folder of a run whose user named none: PRESET-RULE-TIME, unique."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from deeploop.config import Config, ModelConfig
from deeploop.runs.folder import choose_run_folder, claim_folder
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError


@pytest.mark.parametrize(
    ("preset", "residual", "start"),
    [
        ("gpt2-small-r1-baseline", "pre_norm", "gpt2-small-r1-baseline-pre_norm-2"),
        ("deeploop-tiny", "loom", "deeploop-tiny-loom-2"),
        ("deeploop-tiny", "deeploop", "deeploop-tiny-2"),
    ],
)
def test_the_name_has_the_preset_and_the_rule(preset, residual, start):
    folder = choose_run_folder(Config(preset=preset, model=ModelConfig(residual=residual)))
    assert folder.parent.name == "runs" and folder.name.startswith(start)


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(claim_folder, [tmp_path / "runs" / "name"] * 8))
    names = {f"name{x}" for x in ("", *(f"-{n}" for n in range(2, 9)))}
    assert {folder.name for folder in folders} == names == {
        path.name for path in (tmp_path / "runs").iterdir()
    }  # fmt: skip


def test_two_trainers_of_the_same_second_both_start(config, quiet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-000000")
    config = config.replace("train", out="")
    trainers = [open_run(config, quiet) for _ in range(2)]
    for trainer in trainers:
        trainer.lock.close()
    names = [trainer.folder.name for trainer in trainers]
    assert names == ["test-deeploop-20260101-000000", "test-deeploop-20260101-000000-2"]
    assert all((t.folder / "config.json").exists() for t in trainers)


def test_a_parent_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(InputError, match="cannot be created"):
        claim_folder(tmp_path / "runs" / "name")
