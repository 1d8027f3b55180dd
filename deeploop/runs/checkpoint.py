"""Checkpoints: whole or absent, and enough to go on bit for bit.

A checkpoint is a folder `step_000100` of a run's `checkpoints/`: the weights
(model.safetensors), the optimizer (optimizer.pt) and its place (state.json: step,
configuration and the SHA-256 of the other two). It is written under a temporary
name and renamed when it is on disk, so that a kill leaves the last one. There is no
RNG or loader state: the data order is a pure function of (seed, step) and nothing
else is drawn.
"""

import hashlib
import json
import os
import re
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
from deeploop.utils.disk import disk_errors, user_path
from deeploop.utils.errors import InputError

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: where it is, how far it got, what it is of, its files' SHA-256."""

    path: Path
    step: int
    config: Config
    sha256: dict[str, str]

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
    state = {
        "step": step,
        "config": json.loads(config.to_json()),
        "sha256": {name: _sha256(folder / name) for name in (MODEL, OPTIMIZER)},
    }
    (folder / STATE).write_text(json.dumps(state, indent=2) + "\n")
    for file in folder.iterdir():
        _sync(file)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints (0 keeps all) and what kills left half done."""
    for old in steps(run)[:-keep] if keep else []:
        old.rename(old.with_name(f".{old.name}.old"))  # so that it, too, is whole or absent
    for part in (run / "checkpoints").glob(".step_*"):
        shutil.rmtree(part)


def steps(run: Path) -> list[Path]:
    """A run's whole checkpoints, oldest first."""
    found = (run / "checkpoints").glob("step_*")
    whole = (path for path in found if re.fullmatch(r"step_\d+", path.name))
    return sorted(whole, key=lambda path: int(path.name.split("_")[1]))


def find(path: str) -> Checkpoint:
    """The checkpoint at `path`: a step_* folder, or a run folder's newest.

    Raises InputError where there is none or it is torn.
    """
    folder = user_path(path, "run")
    if not path or not (folder / STATE).exists():
        if not path or not folder.is_dir():
            raise InputError(f"run {path!r}: no such folder; give a run folder or a checkpoint")
        found = steps(folder)
        if not found:
            raise InputError(f"run {path!r}: holds no checkpoint; give the folder of a run")
        folder = found[-1]
    else:
        folder = folder.resolve()  # its run is two folders up, whatever it was called
    try:
        state = json.loads((folder / STATE).read_text())
        config = Config.from_json(json.dumps(state["config"]))
        step, sha256 = state["step"], dict(state["sha256"])
        if type(step) is not int or step < 0:
            raise ValueError(f"step is {step!r}")
    except InputError as error:
        raise InputError(f"checkpoint {folder}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise _misfit(folder, STATE, f"is not readable ({reason})") from error
    return Checkpoint(folder, step, config, sha256)


def load_model(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Fill `model` from the checkpoint; raises InputError where the weights do not fit."""
    _check_whole(checkpoint, MODEL)
    try:
        model.load_state_dict(load_file(checkpoint.path / MODEL))
    except (RuntimeError, OSError, SafetensorError) as error:
        raise _misfit(checkpoint.path, MODEL, f"does not fit ({_last_line(error)})") from error


def load_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Fill `optimizer` from the checkpoint; raises InputError where it does not fit.

    Its own decay and betas stay: a run may go on with others.
    """
    _check_whole(checkpoint, OPTIMIZER)
    own = [{name: g[name] for name in ("weight_decay", "betas")} for g in optimizer.param_groups]
    try:
        state: dict[str, Any] = torch.load(
            checkpoint.path / OPTIMIZER, map_location="cpu", weights_only=True
        )
        optimizer.load_state_dict(state)
    except (RuntimeError, OSError, ValueError, EOFError, UnpicklingError) as error:
        raise _misfit(checkpoint.path, OPTIMIZER, f"does not fit ({_last_line(error)})") from error
    for group, kept in zip(optimizer.param_groups, own, strict=True):
        group |= kept


def _check_whole(checkpoint: Checkpoint, name: str) -> None:
    try:
        found = _sha256(checkpoint.path / name)
    except OSError as error:
        reason = f"is not readable ({error.strerror})"
        raise _misfit(checkpoint.path, name, reason) from error
    if found != checkpoint.sha256.get(name):
        raise _misfit(checkpoint.path, name, "is damaged: not the bytes that were saved")


def _last_line(error: Exception) -> str:
    """torch lists every mismatch on a line of its own; the last says enough."""
    return (str(error) or type(error).__name__).splitlines()[-1].strip()


def _misfit(folder: Path, name: str, what: str) -> InputError:
    return InputError(f"checkpoint {folder}: {name} {what}; restore it, or use another checkpoint")
