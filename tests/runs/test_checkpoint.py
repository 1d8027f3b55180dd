"""Checkpoints restore a run exactly, and damaged or foreign ones are refused in a sentence."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from deeploop.config import ModelConfig, TrainConfig
from deeploop.model.looplm import LoopLM
from deeploop.runs import checkpoint
from deeploop.train.optim import adamw
from deeploop.utils.errors import InputError
from tests.helpers.checkpoints import trained_once


def test_round_trip(tmp_path):
    config, model, optimizer = trained_once()
    checkpoint.save(tmp_path, 7, config, model, optimizer)
    ckpt = checkpoint.find(str(tmp_path))
    assert (ckpt.step, ckpt.config, ckpt.run) == (7, config, tmp_path)
    _, other, fresh = trained_once()
    checkpoint.load_weights(ckpt, other)
    checkpoint.load_optimizer(ckpt, fresh)
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
    (tmp_path / "checkpoints" / ".step_2000000.123").mkdir()
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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"step": 1, "config": {"x": 1}}'])
def test_a_torn_state_is_refused(tmp_path, text):
    config, model, optimizer = trained_once()
    path = checkpoint.save(tmp_path, 1, config, model, optimizer)
    (path / "state.json").write_text(text)
    with pytest.raises(InputError) as refused:
        checkpoint.find(str(tmp_path))
    assert "\n" not in str(refused.value)


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
        checkpoint.load_optimizer(ckpt, optimizer)


def test_decay_and_betas_are_the_optimizers_own(tmp_path):
    config, model, optimizer = trained_once()
    checkpoint.save(tmp_path, 1, config, model, optimizer)
    other = adamw(model, TrainConfig(weight_decay=0.3, beta2=0.5, lr=7.0))
    checkpoint.load_optimizer(checkpoint.find(str(tmp_path)), other)
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
    config, model, optimizer = trained_once()
    checkpoint.save(tmp_path, 1, config, model, optimizer)
    script = textwrap.dedent(f"""
        import resource, signal, sys
        from pathlib import Path
        from deeploop.runs import checkpoint
        from deeploop.utils.errors import InputError
        from tests.helpers.checkpoints import trained_once
        saved = trained_once()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
        try:
            checkpoint.save(Path({str(tmp_path)!r}), 2, *saved)
        except InputError as error:
            print(error)
    """)
    for limit in (1000, 12_000, 30_000):
        done = subprocess.run(
            [sys.executable, "-c", script, str(limit)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.count("\n") == 1 and "step_000002" in done.stdout, (limit, done.stderr)
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
        checkpoint.load_optimizer(ckpt, optimizer)


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
