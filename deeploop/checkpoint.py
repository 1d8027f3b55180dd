"""Checkpoints: whole or absent, and enough to go on bit for bit.

A checkpoint is a folder `step_000100` of a run's `checkpoints/`: the weights
(model.safetensors), the optimizer (optimizer.pt) and its place (state.json: step
and configuration). It is written under a temporary name and renamed when it is
on disk, so that a kill leaves the last one. There is no RNG or loader state: the
data order is a pure function of (seed, step) and nothing else is drawn.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from deeploop.config import Config
from deeploop.errors import InputError
from deeploop.shards import disk_errors

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: where it is, how far it got, what it is of."""

    path: Path
    step: int
    config: Config

    @property
    def run(self) -> Path:
        return self.path.parent.parent


def save(
    run: Path, step: int, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    """Write `run/checkpoints/step_NNNNNN`; an existing one of this step is kept.

    Raises InputError, with nothing left behind, where the disk is full.
    """
    final = run / "checkpoints" / f"step_{step:06d}"
    if final.exists():
        return final
    work = final.with_name(f".{final.name}.{os.getpid()}")
    with disk_errors(f"checkpoint {final}"):
        try:
            work.mkdir(parents=True)
            _write(work, step, config, model, optimizer)
            work.rename(final)
            _sync(final.parent)
        except (SafetensorError, RuntimeError) as error:
            # What safetensors and torch make of a write that failed.
            raise InputError(
                f"checkpoint {final} could not be written ({str(error).splitlines()[0]}); "
                "free some space or choose another train.out"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return final


def _write(
    folder: Path, step: int, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    save_file(dict(model.state_dict()), folder / MODEL)
    torch.save(optimizer.state_dict(), folder / OPTIMIZER)
    state = {"step": step, "config": json.loads(config.to_json())}
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n")
    for file in folder.iterdir():
        _sync(file)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints; 0 keeps all."""
    for old in steps(run)[:-keep] if keep else []:
        shutil.rmtree(old)


def steps(run: Path) -> list[Path]:
    """A run's whole checkpoints, oldest first."""
    return sorted((run / "checkpoints").glob("step_*"), key=lambda p: int(p.name.split("_")[1]))


def find(path: str) -> Checkpoint:
    """The checkpoint at `path`: a step_* folder, or a run folder's newest.

    Raises InputError where there is none or it is torn.
    """
    folder = Path(path).expanduser()
    if not (folder / STATE).exists():
        if not folder.is_dir():
            raise InputError(f"run {path!r}: no such folder; give a run folder or a checkpoint")
        found = steps(folder)
        if not found:
            raise InputError(f"run {path!r}: holds no checkpoint; give the folder of a run")
        folder = found[-1]
    try:
        state = json.loads((folder / STATE).read_text())
        return Checkpoint(folder, int(state["step"]), Config.from_json(json.dumps(state["config"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"checkpoint {folder}: {STATE} is not readable ({error})") from error


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Fill `model` from the checkpoint; raises InputError where the weights do not fit."""
    try:
        model.load_state_dict(load_file(checkpoint.path / MODEL))
    except (RuntimeError, OSError, SafetensorError) as error:
        raise _misfit(checkpoint, MODEL, error) from error


def load_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Fill `optimizer` from the checkpoint; raises InputError where it does not fit."""
    try:
        state: dict[str, Any] = torch.load(
            checkpoint.path / OPTIMIZER, map_location="cpu", weights_only=True
        )
        optimizer.load_state_dict(state)
    except (RuntimeError, OSError, ValueError, EOFError, UnpicklingError) as error:
        raise _misfit(checkpoint, OPTIMIZER, error) from error


def _misfit(checkpoint: Checkpoint, name: str, error: Exception) -> InputError:
    """torch lists every mismatch on a line of its own; the last says enough."""
    reason = (str(error) or type(error).__name__).splitlines()[-1].strip()
    return InputError(f"checkpoint {checkpoint.path}: {name} does not fit ({reason})")
