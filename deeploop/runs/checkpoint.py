"""Save and load checkpoints from which training continues bit for bit.

A checkpoint is a folder `step_000100` of a run's `checkpoints/`: the weights
(model.safetensors), the optimizer's state (optimizer.pt), other tensors that the next step reads
(carried.safetensors, of runs that have some), copies of the run's corpus.json and tokenizer file,
and state.json: step, configuration and the SHA-256 of every file. It is written
under a temporary name and renamed when it is on disk, so that a killed process leaves complete
checkpoints only. There is no RNG or loader state: the data order is a pure function of
(seed, step), and training draws no other random numbers.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from deeploop.config import Config
from deeploop.runs.folder import CONFIG, CORPUS, parse_config, read_config, read_corpus_file
from deeploop.runs.tensors import REMEDY, read_optimizer, read_tensors, read_weights
from deeploop.utils.disk import disk_errors, sync, unwritable, user_path, usual_mode
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import foreign, open_regular, read_json

MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "state.json"
CARRIED = "carried.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's folder, its step, its configuration and the SHA-256 of its files by name.

    `newest` is True where a run's folder was named and this is its newest checkpoint. Of a run
    that was stopped before its first checkpoint, `path` is the run's folder, `step` 0 and
    `sha256` empty: it begins again.
    """

    path: Path
    step: int
    config: Config
    sha256: dict[str, str]
    newest: bool = False

    @property
    def saved(self) -> bool:
        """Return whether there are weights to load."""
        return bool(self.sha256)

    @property
    def run(self) -> Path | None:
        """The folder of the run it belongs to; None for a copy outside of one."""
        if not self.saved:
            return self.path
        return self.path.parent.parent if self.path.parent.name == "checkpoints" else None

    @property
    def described_in(self) -> Path:
        """The folder with its corpus.json; before version 0.2 only the run's folder had one."""
        return self.path if CORPUS in self.sha256 or self.run is None else self.run


def save(
    run: Path,
    step: int,
    config: Config,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    carried: Mapping[str, Tensor] = MappingProxyType({}),
) -> Path:
    """Write `run/checkpoints/step_NNNNNN` and return it; an existing one of this step stays.

    The run must be locked: what a killed process left is removed. Raises InputError, with
    nothing left behind, where the disk is full.
    """
    final = run / "checkpoints" / f"step_{step:06d}"
    if final.exists():
        return final
    work = final.with_name(f".{final.name}.tmp")
    with disk_errors(f"checkpoint {final}", run):
        _delete(work)
        try:
            work.mkdir(parents=True)
            _write(work, final, model, optimizer, carried)
            copy_corpus(run, work)
            _write_state(work, step, config)
            for file in (*work.iterdir(), work):
                sync(file)
            work.rename(final)
            sync(final.parent)
            sync(run)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return final


def _write(
    work: Path,
    final: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    carried: Mapping[str, Tensor],
) -> None:
    """Write weights, optimizer state and carried tensors into `work`."""
    writers: dict[str, Callable[[Path], None]] = {
        MODEL: lambda file: save_file(dict(model.state_dict()), file),
        OPTIMIZER: lambda file: torch.save(optimizer.state_dict(), file),
    }
    if carried:
        writers[CARRIED] = lambda file: save_file(dict(carried), file)
    for name, write in writers.items():
        try:
            write(work / name)
        except (SafetensorError, RuntimeError) as error:  # their words for a failed write
            reason = "the disk is full or a limit on file sizes was reached"
            raise unwritable(f"checkpoint {final}: {name}", reason, work) from error
        usual_mode(work / name)


def copy_corpus(source: Path, target: Path) -> None:
    """Copy what generation needs of a run or checkpoint: corpus.json and the tokenizer's file."""
    if not (source / CORPUS).exists():
        return
    tokenizer = read_corpus_file(source).get("tokenizer")
    for name in (CORPUS, tokenizer):
        if name and (source / name).is_file() and Path(name).name == name:
            shutil.copyfile(source / name, target / name)


def _write_state(work: Path, step: int, config: Config) -> None:
    """Write state.json, with the SHA-256 of all files and of its other fields."""
    state: dict[str, Any] = {"step": step, "config": json.loads(config.to_json())}
    state["sha256"] = {file.name: _sha256(file) for file in sorted(work.iterdir())}
    state["sha256"][STATE] = _state_sha256(state)
    (work / STATE).write_text(json.dumps(state, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _state_sha256(state: dict[str, Any]) -> str:
    """Return the SHA-256 of the fields of state.json, without that digest itself."""
    others = {name: digest for name, digest in state["sha256"].items() if name != STATE}
    text = json.dumps(state | {"sha256": others}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def prune(run: Path, keep: int) -> list[str]:
    """Delete all but the newest `keep` checkpoints (0 keeps all) and incomplete ones.

    Returns a sentence for each that could not be deleted, such as one on a file system that
    keeps open files; the next call tries again.
    """
    left = clear_incomplete(run)
    for old in steps(run)[:-keep] if keep else []:
        hidden = old.with_name(f".{old.name}.old")  # a kill while deleting leaves no step_*
        try:
            old.rename(hidden)
            _delete(hidden)
        except OSError as error:
            left.append(f"old checkpoint {old} could not be deleted ({error.strerror or error})")
    return left


def clear_incomplete(run: Path) -> list[str]:
    """Delete what killed processes left of checkpoints; returns a sentence for each failure.

    The run must be locked.
    """
    left = []
    for incomplete in (run / "checkpoints").glob(".step_*"):
        try:
            _delete(incomplete)
        except OSError as error:
            left.append(f"{incomplete} could not be deleted ({error.strerror or error})")
    return left


def _delete(path: Path) -> None:
    """Delete a folder, or a file or link in its place; nothing where there is none."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def steps(run: Path) -> list[Path]:
    """List the folders of a run's complete checkpoints, oldest first."""
    folders = (run / "checkpoints").glob("step_*")
    complete = (path for path in folders if re.fullmatch(r"step_\d+", path.name))
    return sorted(complete, key=lambda path: int(path.name.split("_")[1]))


def find(path: str, begin: bool = False) -> Checkpoint:
    """Open the checkpoint at `path`: a step_* folder, or the newest of a run's folder.

    Args:
        path: of a checkpoint or a run.
        begin: accept a run without a checkpoint, which then begins again from its config.json.

    Raises:
        InputError: there is none, or its state.json is not readable.
    """
    folder = user_path(path, "run")
    if path and (folder / STATE).exists():
        return _open(folder.resolve(), False)  # "." does not show the run two folders up
    if not path or not folder.is_dir():
        raise InputError(f"run {path!r}: no such folder; give a run folder or a checkpoint")
    saved = steps(folder)
    if saved:
        return _open(saved[-1], True)
    if begin and (folder / CONFIG).exists():
        return Checkpoint(folder, 0, read_config(folder / CONFIG), {})
    raise InputError(f"run {path!r}: has no checkpoint; give the folder of a run")


def _open(folder: Path, newest: bool) -> Checkpoint:
    """Read state.json of a checkpoint and check all its small files."""
    what = f"checkpoint {folder}: {STATE}"
    state = read_json(folder / STATE, what, {"step": int, "config": dict, "sha256": dict})
    sha256, step = state["sha256"], state["step"]
    if sha256.get(STATE, digest := _state_sha256(state)) != digest:
        raise _unusable(folder, STATE, "is damaged: not the fields that were saved")
    named = re.fullmatch(r"step_(\d+)", folder.name)
    if step < 0 or (named and int(named[1]) != step):
        raise _unusable(folder, STATE, f"says step {step}")
    config = parse_config(json.dumps(state["config"]), what)
    checkpoint = Checkpoint(folder, step, config, sha256, newest)
    for name in sha256.keys() - {MODEL, OPTIMIZER, CARRIED, STATE}:
        _check_digest(checkpoint, name)
    return checkpoint


def load_weights(
    checkpoint: Checkpoint,
    model: nn.Module,
    fresh: Callable[[str], bool] = lambda _: False,
    remedy: str = REMEDY,
) -> None:
    """Copy the checkpoint's weights into `model`.

    Args:
        checkpoint: with weights.
        model: whose own weights stay where the checkpoint has none and `fresh` allows it.
        fresh: by the name of a weight, whether it may stay.
        remedy: what to do about a weight that does not fit, in an error.

    Raises InputError where the file is damaged, or its names, shapes and dtypes are not the
    model's.
    """
    _check_digest(checkpoint, MODEL)
    what = f"checkpoint {checkpoint.path}: {MODEL}"
    model.load_state_dict(read_weights(checkpoint.path / MODEL, what, model, fresh, remedy))


def load_optimizer(
    checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, model: nn.Module
) -> None:
    """Copy the checkpoint's moments and step counts into `optimizer`, by parameter name.

    Args:
        checkpoint: with weights.
        optimizer: it keeps its weight decay and betas, because a resumed run may set others.
        model: whose parameters it steps (`deeploop.train.optim.make_optimizer`).

    Raises InputError where the file is damaged or does not fit the parameters.
    """
    _check_digest(checkpoint, OPTIMIZER)
    what = f"checkpoint {checkpoint.path}: {OPTIMIZER}"
    state = read_optimizer(checkpoint.path / OPTIMIZER, what, optimizer, model)
    optimizer.load_state_dict(state)


def load_carried(checkpoint: Checkpoint, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the carried tensors, of the names, shapes and dtypes of `wanted`; raises InputError.

    Without any wanted, the file is not read.
    """
    if not wanted:
        return {}
    _check_digest(checkpoint, CARRIED)
    return read_tensors(
        checkpoint.path / CARRIED, f"checkpoint {checkpoint.path}: {CARRIED}", wanted
    )


def load_averages(checkpoint: Checkpoint, model: nn.Module, prefix: str) -> None:
    """Copy the carried tensors called `prefix` + name into the parameters of these names."""
    _check_digest(checkpoint, CARRIED)
    what = f"checkpoint {checkpoint.path}: {CARRIED}"
    named = {prefix + name: p for name, p in model.named_parameters()}
    tensors = read_tensors(checkpoint.path / CARRIED, what, named, others=True)
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensors[name])


def _check_digest(checkpoint: Checkpoint, name: str) -> None:
    """Raise InputError unless the file has the SHA-256 that was recorded when it was saved."""
    what = f"checkpoint {checkpoint.path}: {name}"
    with open_regular(checkpoint.path / name, what) as file, foreign(what, REMEDY):
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != checkpoint.sha256.get(name):
        raise _unusable(checkpoint.path, name, "is damaged: not the bytes that were saved")


def _unusable(folder: Path, name: str, reason: str) -> InputError:
    return InputError(f"checkpoint {folder}: {name} {reason}; {REMEDY}")
