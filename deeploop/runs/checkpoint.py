"""Save and load checkpoints from which training continues bit for bit.

A checkpoint is a folder `step_000100` of a run's `checkpoints/`: the weights
(model.safetensors), the optimizer's state (optimizer.pt) and state.json: step,
configuration and the SHA-256 of the other two files. It is written under a temporary
name and renamed when it is on disk, so that a killed process leaves complete checkpoints
only. There is no RNG or loader state: the data order is a pure function of (seed, step),
and training draws no other random numbers.
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
from deeploop.config.renames import renamed_weights
from deeploop.utils.disk import disk_errors, user_path
from deeploop.utils.errors import InputError

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "state.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, its step, its configuration and the SHA-256 of its files by name."""

    path: Path
    step: int
    config: Config
    sha256: dict[str, str]

    @property
    def run(self) -> Path:
        """The folder of the run it belongs to."""
        return self.path.parent.parent


def save(
    run: Path, step: int, config: Config, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Path:
    """Write `run/checkpoints/step_NNNNNN` and return it; an existing one of this step stays.

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
            # safetensors and torch raise these where a write failed.
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
    """Delete all but the newest `keep` checkpoints (0 keeps all) and incomplete ones."""
    for old in steps(run)[:-keep] if keep else []:
        old.rename(old.with_name(f".{old.name}.old"))  # a kill while deleting leaves no step_*
    for incomplete in (run / "checkpoints").glob(".step_*"):
        shutil.rmtree(incomplete)


def steps(run: Path) -> list[Path]:
    """List the folders of a run's complete checkpoints, oldest first."""
    folders = (run / "checkpoints").glob("step_*")
    complete = (path for path in folders if re.fullmatch(r"step_\d+", path.name))
    return sorted(complete, key=lambda path: int(path.name.split("_")[1]))


def find(path: str) -> Checkpoint:
    """Open the checkpoint at `path`: a step_* folder, or the newest of a run's folder.

    Raises InputError where there is none, or its state.json is not readable.
    """
    folder = user_path(path, "run")
    if not path or not (folder / STATE).exists():
        if not path or not folder.is_dir():
            raise InputError(f"run {path!r}: no such folder; give a run folder or a checkpoint")
        saved = steps(folder)
        if not saved:
            raise InputError(f"run {path!r}: has no checkpoint; give the folder of a run")
        folder = saved[-1]
    else:
        folder = folder.resolve()  # a path such as "." does not show the run two folders up
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
        raise _unusable(folder, STATE, f"is not readable ({reason})") from error
    return Checkpoint(folder, step, config, sha256)


def load_weights(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Copy the checkpoint's weights into `model`.

    Raises InputError where the file is damaged, or its names and shapes are not the model's.
    """
    _check_digest(checkpoint, MODEL)
    try:
        weights = renamed_weights(load_file(checkpoint.path / MODEL))
        model.load_state_dict(weights)
    except (RuntimeError, OSError, SafetensorError) as error:
        reason = f"does not fit ({_last_line(error)})"
        raise _unusable(checkpoint.path, MODEL, reason) from error


def load_optimizer(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer) -> None:
    """Copy the checkpoint's moments and step counts into `optimizer`.

    `optimizer` keeps its weight decay and betas, because a resumed run may set others.
    Raises InputError where the file is damaged or does not fit the parameters.
    """
    _check_digest(checkpoint, OPTIMIZER)
    settings = [{name: g[name] for name in ("weight_decay", "betas")}
                for g in optimizer.param_groups]  # fmt: skip
    try:
        state: dict[str, Any] = torch.load(
            checkpoint.path / OPTIMIZER, map_location="cpu", weights_only=True
        )
        optimizer.load_state_dict(state)
    except (RuntimeError, OSError, ValueError, EOFError, UnpicklingError) as error:
        reason = f"does not fit ({_last_line(error)})"
        raise _unusable(checkpoint.path, OPTIMIZER, reason) from error
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group |= setting


def _check_digest(checkpoint: Checkpoint, name: str) -> None:
    """Raise InputError unless the file has the SHA-256 that was recorded when it was saved."""
    try:
        digest = _sha256(checkpoint.path / name)
    except OSError as error:
        reason = f"is not readable ({error.strerror})"
        raise _unusable(checkpoint.path, name, reason) from error
    if digest != checkpoint.sha256.get(name):
        raise _unusable(checkpoint.path, name, "is damaged: not the bytes that were saved")


def _last_line(error: Exception) -> str:
    """Return the last line of an error: torch lists each mismatch on its own line."""
    return (str(error) or type(error).__name__).splitlines()[-1].strip()


def _unusable(folder: Path, name: str, reason: str) -> InputError:
    return InputError(
        f"checkpoint {folder}: {name} {reason}; restore it, or use another checkpoint"
    )
