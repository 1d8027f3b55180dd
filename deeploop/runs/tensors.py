"""Read weights and optimizer states: every tensor is checked before anything is allocated for it.

Files of an unknown origin may hold tensors of other shapes, which a fused optimizer would read
and write outside of their memory, or a few bytes that claim to be gigabytes.
"""

import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deeploop.config.renames import renamed_weights
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief, foreign

REMEDY = "restore it, or use another checkpoint"
MOMENTS = ("exp_avg", "exp_avg_sq")


def read_weights(
    path: Path, what: str, model: nn.Module, fresh: Callable[[str], bool], remedy: str = REMEDY
) -> dict[str, Tensor]:
    """Return the weights in a .safetensors file, under today's names.

    Args:
        path: a regular file; its size bounds the memory that is taken.
        what: name of the file in an error.
        model: whose names, shapes and dtypes the weights must have.
        fresh: by the name of a weight, whether the model's own may stay where the file has none.
        remedy: what to do about a weight that does not fit, in an error.

    Raises:
        InputError: the file is damaged or a tensor is not one of the model's.
    """
    with foreign(what, REMEDY):
        weights = renamed_weights(load_file(path))
    wanted = model.state_dict()
    own = {name: wanted[name] for name in wanted.keys() - weights.keys() if fresh(name)}
    weights |= own
    check_same_tensors(weights, wanted, what, "weight", remedy)
    return weights


def read_tensors(
    path: Path, what: str, wanted: Mapping[str, Tensor], others: bool = False
) -> dict[str, Tensor]:
    """Return the tensors in a .safetensors file; raises InputError unless they are like `wanted`.

    Args:
        path: a regular file; its size bounds the memory that is taken.
        what: name of the file in an error.
        wanted: by name, tensors of the shapes and dtypes.
        others: leave tensors of other names out, in the place of refusing them.
    """
    with foreign(what, REMEDY):
        tensors = load_file(path)
    if others:
        tensors = {name: x for name, x in tensors.items() if name in wanted}
    check_same_tensors(tensors, wanted, what, "tensor")
    return tensors


def check_same_tensors(
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    what: str,
    kind: str,
    remedy: str = REMEDY,
) -> None:
    """Refuse tensors of other names, shapes or dtypes than wanted."""
    for name in sorted(wanted.keys() ^ tensors.keys()):
        reason = "lacks" if name in wanted else "has, and the model has not,"
        raise InputError(f"{what} does not fit: {reason} the {kind} {brief(name)}; {remedy}")
    for name, tensor in tensors.items():
        check_like(tensor, wanted[name], f"{what} does not fit: the {kind} {name}", remedy)


def read_optimizer(
    path: Path, what: str, optimizer: torch.optim.Optimizer, model: nn.Module
) -> dict[str, Any]:
    """Return a state for `optimizer.load_state_dict` from a file of torch.save.

    Moments belong to parameters by name, whatever group these are in. The groups keep all settings
    of `optimizer` but the learning rate. The tensors are mapped, checked against the parameters,
    and only then copied.

    Args:
        path: a regular file.
        what: name of the file in an error.
        optimizer: whose groups have names, and one learning rate.
        model: whose parameters it steps.

    Raises:
        InputError: the file is damaged or does not fit the parameters.
    """
    mine = optimizer.state_dict()["param_groups"]
    order = chain(*(group["param_names"] for group in mine))
    numbers = {name: i for i, name in enumerate(order)}
    with foreign(what, REMEDY):
        _check_zip(path)
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        states, groups = dict(saved["state"]), list(saved["param_groups"])
        rates = [float(group["lr"]) for group in groups]
        names = saved_names(groups, mine, model)
        fits = sorted(names) == sorted(numbers)
    if not fits:
        raise InputError(f"{what} does not fit: it groups other parameters; {REMEDY}")
    if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
        raise InputError(f"{what} is damaged: the learning rates are {brief(rates)}; {REMEDY}")
    parameters = dict(model.named_parameters())
    copies = {}
    for index, state in states.items():
        if type(index) is not int or not 0 <= index < len(names):
            raise InputError(f"{what} does not fit: no parameter is {brief(index)}; {REMEDY}")
        name = names[index]
        copies[numbers[name]] = _copy(state, parameters[name], f"{what} does not fit: {name}")
    groups = [group | {"lr": rates[0]} for group in mine]
    return {"state": copies, "param_groups": groups}


def saved_names(
    groups: Sequence[dict[str, Any]], mine: Sequence[dict[str, Any]], model: nn.Module
) -> list[str]:
    """Return the names of a saved state's parameters by their numbers; none if they do not fit.

    In files written before the groups had names these are today's groups, or two: matrices, and
    all other parameters (weights that are never decayed had no group yet).

    Args:
        groups: param_groups of the saved state.
        mine: those of the optimizer today.
        model: whose parameters it steps.
    """
    sizes = [len(group["params"]) for group in groups]
    if [*chain(*(group["params"] for group in groups))] != [*range(sum(sizes))]:
        return []
    if all("param_names" in group for group in groups):
        return [*renamed_weights({name: 0 for group in groups for name in group["param_names"]})]
    today = [group["param_names"] for group in mine]
    stepped = [(name, p.dim()) for name, p in model.named_parameters() if name in {*chain(*today)}]
    older = [
        [name for name, dim in stepped if dim >= 2], [name for name, dim in stepped if dim < 2],
    ]  # fmt: skip
    for layout in (today, older):
        if [*map(len, layout)] == sizes:
            return [*chain(*layout)]
    return []


def _check_zip(path: Path) -> None:
    """Refuse an archive that would unpack to more bytes than it has."""
    with zipfile.ZipFile(path) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise ValueError("it unpacks to more bytes than it has")


def _copy(state: Any, parameter: Tensor, what: str) -> dict[str, Tensor]:
    """Copy one parameter's step count and moments, once they are known to fit it."""
    if not isinstance(state, dict) or state.keys() != {"step", *MOMENTS}:
        raise InputError(f"{what} has not a step, exp_avg and exp_avg_sq; {REMEDY}")
    check_like(state["step"], torch.zeros(()), f"{what}: step")
    if not 0 <= float(state["step"]) < 2**31:
        raise InputError(f"{what}: step is {float(state['step'])}; {REMEDY}")
    for name in MOMENTS:
        check_like(state[name], parameter, f"{what}: {name}")
    return {name: value.clone() for name, value in state.items()}


def check_like(tensor: Any, wanted: Tensor, what: str, remedy: str = REMEDY) -> None:
    """Refuse a value that is not a dense tensor of the shape and dtype of `wanted`."""
    dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
    if not dense or tensor.device.type == "meta":
        raise InputError(f"{what} is not a dense tensor; {remedy}")
    if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
        raise InputError(
            f"{what} is {tensor.dtype} {list(tensor.shape)}, not "
            f"{wanted.dtype} {list(wanted.shape)}; {remedy}"
        )
