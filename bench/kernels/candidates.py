"""The launch settings that bench.kernels.tune tries, and launches of them on random tensors.

Nothing here needs a GPU.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeploop.kernels import _launch, registry
from deeploop.kernels._launch import Launch, LaunchConfig, TilePlan

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# What an H100 or H200 has on each SM: registers, bytes of shared memory, warps.
REGISTERS, SHARED, WARPS = 65536, 228 << 10, 64
# Statistics of a forward; gradients and partial sums of a backward. Added up over their
# first dimension, partial sums do not depend on how many programs there were.
FORWARD = ("h_new_ptr", "local_new_ptr", "glob_new_ptr", "n_ptr", "r_ptr", "r1_ptr", "r2_ptr")
BACKWARD = ("dh_ptr", "df_ptr", "dlocal_ptr", "dglob_ptr", "drouted_ptr", "dshared_ptr")
PARTIAL = ("dw_out_ptr", "dw_branch_ptr", "dw_next_ptr", "dweights_ptr")


class Tuned(NamedTuple):
    """An op whose launches can be tuned: its name in aot_launches, and which column it has."""

    title: str
    column: str  # of _launch._BACKWARD: the number of gains; the combine stands beside it


OPS = {op.name: Tuned(op.title or op.name, op.tuned) for op in registry.OPS.values() if op.tuned}


class Case(NamedTuple):
    """One launch to tune."""

    op: str
    direction: str
    n_rows: int
    d: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {self.direction} {self.n_rows} x {self.d} {self.dtype}"

    def launch(self, device: str, config: LaunchConfig | None = None, n_rows: int = 0) -> Launch:
        """As the op makes it, or with another config; its tensors are not filled."""
        x = torch.empty(n_rows or self.n_rows, self.d, dtype=DTYPES[self.dtype], device=device)
        w = torch.empty(self.d, device=device)
        launches = registry.OPS[self.op].launches(x, w, config)
        return launches[f"{OPS[self.op].title} {self.direction}"]


# ---------------------------------------------------------------------------
# Which settings


def power(d: int) -> int:
    """The key of the tables in kernels/_launch.py."""
    return max(1024, 1 << (d - 1).bit_length())


def plan_of(config: LaunchConfig, d: int) -> TilePlan:
    """The plan a backward config comes from."""
    splits = 0 if config.chunks == 1 else config.splits
    times = 1 if splits else max(1, config.rows * config.block // power(d))
    return TilePlan(config.warps, config.per_sm, splits, config.stages, times)


def _programs(warps: int) -> list[int]:
    """Programs per SM that come to 8 up to 32 warps; each is compiled for its registers."""
    return sorted({max(1, total // warps) for total in (8, 12, 16, 24, 32)})


def whole_row_plans(d: int) -> list[TilePlan]:
    """List plans for whole rows, 8 to 32 values a thread; two stages would wait as one does."""
    shapes = [(1, 8), (1, 16), (1, 32), (2, 8), (2, 16)]
    return [
        TilePlan(warps, per_sm, 0, stages, times)
        for times, values in shapes
        if 1 <= (warps := times * power(d) // (32 * values)) <= 32
        for per_sm in _programs(warps)
        for stages in (1, 3, 4)
    ]


def chunked_plans(d: int) -> list[TilePlan]:
    """List plans for rows in chunks, if a row has more than one."""
    if d <= 2048:
        return []
    return [
        TilePlan(warps, per_sm, splits, stages)
        for warps in (4, 8, 16)
        for per_sm in _programs(warps)
        for splits in (1, 2)
        for stages in (1, 3)
    ]


def backward_configs(case: Case, default: LaunchConfig) -> list[LaunchConfig]:
    """List the backward configs to time, without repeats, the default first."""
    itemsize = DTYPES[case.dtype].itemsize
    whole, chunked = whole_row_plans(case.d), chunked_plans(case.d)
    if case.op == "expert_combine":  # its wide kernel has no stages; 16 warps of it spill
        chunked = [plan for plan in chunked if plan.stages == 1]
    configs = [_launch.planned(case.d, itemsize, plan) for plan in whole]
    in_chunks = (_launch.planned(case.d, itemsize, plan) for plan in chunked)
    configs += [config for config in in_chunks if config.chunks > config.splits]
    return list(dict.fromkeys([default, *configs]))


def forward_configs(case: Case, default: LaunchConfig) -> list[LaunchConfig]:
    """List the forward configs to time, the default first: whole rows, 8 to 32 values a thread."""
    block = 1 << (case.d - 1).bit_length()
    configs = [
        LaunchConfig(block, n_rows, warps)
        for n_rows in (1, 2, 4, 8, 16)
        for values in (8, 16, 32)
        if 1 <= (warps := n_rows * block // (32 * values)) <= 16
    ]
    return list(dict.fromkeys([default, *configs]))


def configs(case: Case) -> list[LaunchConfig]:
    """List all configs to time, the default first."""
    default = case.launch("meta").config
    return (forward_configs if case.direction == "forward" else backward_configs)(case, default)


def fits(config: LaunchConfig, registers: int, shared: int) -> bool:
    """Return whether the programs per SM that config asks for fit an SM at the same time."""
    registers = -(-registers // 8) * 8 * 32 * config.warps
    per_sm = max(1, config.per_sm)
    return (
        registers * per_sm <= REGISTERS
        and (shared + 1024) * per_sm <= SHARED
        and config.warps * per_sm <= WARPS
    )


# ---------------------------------------------------------------------------
# Tensors


def fill(name: str, x: Tensor) -> Tensor:
    """Make a tensor of random values that suit an argument of this name."""
    if name == "slots_ptr":
        return torch.randperm(x.numel(), device=x.device, dtype=x.dtype).view(x.shape)
    if not x.is_floating_point():
        return torch.zeros_like(x)
    if name in ("r_ptr", "r1_ptr", "r2_ptr", "weights_ptr"):
        return torch.rand_like(x).add_(0.5)
    return torch.randn_like(x)


def tensors_of(launch: Launch) -> dict[str, Tensor]:
    """Make a separate tensor for every argument, so that each is read from memory."""
    return {name: fill(name, x) for name, x in launch.args.items() if isinstance(x, Tensor)}


def with_tensors(launch: Launch, tensors: dict[str, Tensor]) -> Launch:
    """The launch on these tensors; its own where another config asks for another shape."""

    def chosen(name: str, value: Any) -> Any:
        mine = tensors.get(name)
        return mine if isinstance(value, Tensor) and _alike(mine, value) else value

    return launch._replace(args={k: chosen(k, value) for k, value in launch.args.items()})


def _alike(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and a.dtype == b.dtype


def partials(launch: Launch) -> list[Tensor]:
    return [launch.args[name] for name in PARTIAL if launch.args.get(name) is not None]


def run(launch: Launch) -> list[Tensor]:
    """The launch, and the sums over its programs that the op takes."""
    launch.run(next(x for x in launch.args.values() if isinstance(x, Tensor)))
    return [x.sum(0) for x in partials(launch)]


def results(case: Case, launch: Launch) -> list[Tensor]:
    """Run it; its first and last rows, and its sums."""
    names = FORWARD if case.direction == "forward" else BACKWARD
    written = [launch.args[name] for name in names if launch.args.get(name) is not None]
    for x in (*written, *partials(launch)):
        x.fill_(float("nan"))
    sums = run(launch)
    ends = [torch.cat([x[:512], x[-512:]]) for x in written]
    return [x.float() for x in (*ends, *sums)]


def bytes_of(launch: Launch) -> int:
    """Return the fewest bytes a launch moves: every tensor once, without partial sums."""
    moved = [
        x.numel() * x.itemsize
        for name, x in launch.args.items()
        if isinstance(x, Tensor) and name not in PARTIAL
    ]
    return sum(moved)


@functools.cache
def table() -> dict[str, dict[int, Any]]:
    """The tables of kernels/_launch.py as they are, by column."""
    backward = {
        column: {block: plans[i] for block, plans in _launch._BACKWARD.items()}
        for i, column in enumerate(("one gain", "two gains"))
    }
    return backward | {"forward": dict(_launch._FORWARD)}
