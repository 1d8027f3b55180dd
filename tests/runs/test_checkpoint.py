"""Checkpoints restore a run exactly, and damaged or foreign ones are refused in a sentence."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from deeploop.config import ModelConfig, TrainConfig
from deeploop.model.looplm import LoopLM
from deeploop.runs import checkpoint
from deeploop.train.optim import make_optimizer
from deeploop.utils.errors import InputError
from tests.helpers.checkpoints import sign, trained_once
from tests.helpers.data import refused
from tests.helpers.limits import file_size_limit


def test_round_trip(tmp_path):
    config, model, optimizer = trained_once()
    checkpoint.save(tmp_path, 7, config, model, optimizer)
    ckpt = checkpoint.find(str(tmp_path))
    assert (ckpt.step, ckpt.config, ckpt.run) == (7, config, tmp_path)
    _, other, fresh = trained_once()
    checkpoint.load_weights(ckpt, other)
    checkpoint.load_optimizer(ckpt, fresh, other)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_tied_and_looped_weights_are_saved_once(tmp_path):
    sizes = []
    for loops in (1, 9):
        config, model, optimizer = trained_once(loops)
        path = checkpoint.save(tmp_path / str(loops), 1, config, model, optimizer)
        sizes.append((path / "model.safetensors").stat().st_size)
    assert sizes[0] == sizes[1]


def test_the_newest_by_number_wins_and_litter_is_ignored(tmp_path):
    config, model, optimizer = trained_once()
    for step in (5, 999_999, 1_000_000):
        checkpoint.save(tmp_path, step, config, model, optimizer)
    (tmp_path / "checkpoints" / ".step_2000000.tmp").mkdir()
    assert checkpoint.find(str(tmp_path)).step == 1_000_000
    checkpoint.prune(tmp_path, 1)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_1000000"]


def test_an_existing_checkpoint_is_not_written_over(tmp_path):
    config, model, optimizer = trained_once()
    path = checkpoint.save(tmp_path, 1, config, model, optimizer)
    before = (path / "model.safetensors").read_bytes()
    model.embed_tokens.weight.data.zero_()
    assert checkpoint.save(tmp_path, 1, config, model, optimizer) == path
    assert (path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("path", ["absent", "empty"])
def test_no_checkpoint_there(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=path):
        checkpoint.find(str(tmp_path / path))


STATE = '{"step": 1, "config": %s, "sha256": %s}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"step": 1}',
        '{"step": 1, "config": {"x": 1}}',
        STATE % ("{}", "{}"),
        STATE % ('{"model": 1, "data": 2, "train": 3}', "{}"),
        STATE
        % ('{"model": {"d_model": ' + "[" * 900 + "]" * 900 + '}, "data": {}, "train": {}}', "{}"),
        STATE % ("{}", '{"../../x": 1}'),
        STATE.replace("1", "[" * 10**5) % ("{}", "{}"),
    ],
)
def test_a_torn_state_is_refused(tmp_path, text):
    config, model, optimizer = trained_once()
    path = checkpoint.save(tmp_path, 1, config, model, optimizer)
    (path / "state.json").write_text(text)
    refused(lambda: checkpoint.find(str(tmp_path)), path, "state.json")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("keep", [0, 0.5])
def test_torn_files_are_refused(tmp_path, name, keep):
    config, model, optimizer = trained_once()
    path = checkpoint.save(tmp_path, 1, config, model, optimizer) / name
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    ckpt = checkpoint.find(str(tmp_path))
    with pytest.raises(InputError, match=f"{name} is damaged.*another checkpoint"):
        checkpoint.load_weights(ckpt, model)
        checkpoint.load_optimizer(ckpt, optimizer, model)


def test_decay_and_betas_are_the_optimizers_own(tmp_path):
    config, model, optimizer = trained_once()
    checkpoint.save(tmp_path, 1, config, model, optimizer)
    other = make_optimizer(model, TrainConfig(weight_decay=0.3, beta2=0.5, lr=7.0))
    checkpoint.load_optimizer(checkpoint.find(str(tmp_path)), other, model)
    assert [g["weight_decay"] for g in other.param_groups] == [0.3, 0.0]
    assert [g["betas"] for g in other.param_groups] == [(0.9, 0.5)] * 2
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_weights_of_another_shape_are_refused(tmp_path):
    config, model, optimizer = trained_once()
    checkpoint.save(tmp_path, 1, config, model, optimizer)
    other = LoopLM(ModelConfig(d_model=32, n_heads=2, n_layers=1, loops=2, vocab_size=11))
    with pytest.raises(InputError, match="does not fit"):
        checkpoint.load_weights(checkpoint.find(str(tmp_path)), other)


def test_a_full_disk_leaves_the_last_checkpoint_and_one_sentence(tmp_path):
    """A limit on file size stands in for the disk: writes fail half-way, as there."""
    saved = trained_once()
    checkpoint.save(tmp_path, 1, *saved)
    for limit in (1000, 12_000, 30_000):
        with file_size_limit(limit), pytest.raises(InputError) as refusal:
            checkpoint.save(tmp_path, 2, *saved)
        said = str(refusal.value)
        assert "step_000002: " in said and "MB free" in said and "limit on file sizes" in said
        assert "os error" not in said and "enforce" not in said
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]
    assert checkpoint.find(str(tmp_path)).step == 1


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_bytes_changed_in_the_middle_are_noticed(tmp_path, name):
    config, model, optimizer = trained_once()
    path = checkpoint.save(tmp_path, 1, config, model, optimizer) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ckpt = checkpoint.find(str(tmp_path))
    with pytest.raises(InputError, match=f"{name} is damaged"):
        checkpoint.load_weights(ckpt, model)
        checkpoint.load_optimizer(ckpt, optimizer, model)


def test_other_folders_beside_checkpoints_are_ignored(tmp_path):
    checkpoint.save(tmp_path, 1, *trained_once())
    (tmp_path / "checkpoints" / "step_000002.bak").mkdir()
    (tmp_path / "checkpoints" / "step_old").mkdir()
    assert checkpoint.find(str(tmp_path)).step == 1


def test_what_a_killed_save_left_is_cleared_away(tmp_path):
    checkpoint.save(tmp_path, 1, *trained_once())
    (tmp_path / "checkpoints" / ".step_000002.99").mkdir()
    checkpoint.prune(tmp_path, 2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


def test_a_killed_save_does_not_hinder_the_next_one(tmp_path):
    """Of any process: in a container the next one has the same id."""
    for left in (".step_000001.tmp", f".step_000001.{os.getpid()}"):
        (tmp_path / "checkpoints" / left / "sub").mkdir(parents=True)
    checkpoint.save(tmp_path, 1, *trained_once())
    checkpoint.prune(tmp_path, 1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


def test_every_changed_digit_of_a_state_is_noticed(tmp_path):
    path = checkpoint.save(tmp_path, 1, *trained_once()) / "state.json"
    text = path.read_text()
    digits = [i for i, c in enumerate(text) if c.isdigit()]
    assert len(digits) > 100
    for i in digits:
        path.write_text(text[:i] + str((int(text[i]) + 1) % 10) + text[i + 1 :])
        with pytest.raises(InputError, match=r"state\.json"):
            checkpoint.find(str(tmp_path))
    path.write_text(text)
    assert checkpoint.find(str(tmp_path)).step == 1


def test_the_folders_name_and_the_step_must_agree(tmp_path):
    path = checkpoint.save(tmp_path, 1, *trained_once())
    path.rename(path.with_name("step_000002"))
    refused(lambda: checkpoint.find(str(tmp_path)), "step_000002", "says step 1")
    copy = tmp_path / "best"  # a name without a number is free
    (path.with_name("step_000002")).rename(copy)
    found = checkpoint.find(str(copy))
    assert found.step == 1 and found.run is None


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.pt", "corpus.json"])
def test_only_regular_files_are_opened(tmp_path, name, kind):
    config, model, optimizer = trained_once()
    (tmp_path / "corpus.json").write_text('{"tokenizer": "byte"}')
    file = checkpoint.save(tmp_path, 1, config, model, optimizer) / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()

    def load():
        ckpt = checkpoint.find(str(tmp_path))
        checkpoint.load_weights(ckpt, model)
        checkpoint.load_optimizer(ckpt, optimizer, model)

    refused(load, name, "not a regular file")


@pytest.mark.parametrize("change", ["dtype", "name", "missing"])
def test_weights_of_other_names_and_dtypes_are_refused(tmp_path, change):
    config, model, optimizer = trained_once()
    path = checkpoint.save(tmp_path, 1, config, model, optimizer)
    weights = load_file(path / "model.safetensors")
    name = next(iter(weights))
    value = weights.pop(name)
    if change != "missing":
        weights[name if change == "dtype" else "x" * 999] = value.half()
    save_file(weights, path / "model.safetensors")
    sign(path)
    ckpt = checkpoint.find(str(tmp_path))
    refused(lambda: checkpoint.load_weights(ckpt, model), "model.safetensors does not fit")


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    saved = trained_once()
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, *saved)
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "checkpoints" / "step_000001").rename(elsewhere)
    (tmp_path / "checkpoints" / "step_000001").symlink_to(elsewhere)

    def busy(*_, **__):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        (warning,) = checkpoint.prune(tmp_path, 1)
    assert "step_000002 could not be deleted (Directory not empty)" in warning
    assert (elsewhere / "state.json").exists()  # a link is deleted, and not its target
    assert checkpoint.prune(tmp_path, 1) == []
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_000003"]


def test_files_have_the_usual_mode(tmp_path):
    before = os.umask(0o027)
    try:
        path = checkpoint.save(tmp_path, 1, *trained_once())
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in path.iterdir()} == {oct(0o640)}


def test_files_and_folders_are_on_disk_before_the_next_step(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    checkpoint.save(tmp_path, 1, *trained_once())
    folder = tmp_path / "checkpoints"
    work = folder / ".step_000001.tmp"
    files = {str(work / n) for n in ("model.safetensors", "optimizer.pt", "state.json")}
    assert set(synced[:3]) == files
    assert synced[3:] == [str(work), str(folder), str(tmp_path)]


def test_a_checkpoint_of_a_version_without_checksums_of_all_files_loads(tmp_path):
    config, model, optimizer = trained_once()
    path = checkpoint.save(tmp_path, 1, config, model, optimizer)
    sign(path)  # without that of state.json
    ckpt = checkpoint.find(str(tmp_path))
    assert "state.json" not in json.loads((path / "state.json").read_text())["sha256"]
    checkpoint.load_weights(ckpt, model)
    checkpoint.load_optimizer(ckpt, optimizer, model)
