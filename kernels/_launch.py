"""Launches of the Triton kernels: the fixed table of launch settings, grids, and one way to run.

A row kernel sees its inputs as [rows, d]: all dimensions but the last are flattened.
Nothing here needs a GPU. Triton may be absent (it ships for Linux only); the kernels
are then plain Python functions that are never called.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._aten import compute_dtype

try:
    import triton  # the Triton package: an absolute import never means the folder of that name
    import triton.language as tl
except ImportError:
    triton = None
    tl = types.SimpleNamespace(constexpr=int)

# Widest row the Triton kernels are built and spill-checked for; wider rows take
# the PyTorch path.
MAX_D = 16384
REGISTERS = 65536  # of one SM, from sm_80 to sm_100


def jit(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """Compile a kernel with `triton.jit`; leave it a plain function where Triton is absent."""
    if triton is None:
        return lambda fn: fn
    return triton.jit(**options)


@functools.cache
def interpreting() -> bool:
    """True if Triton was imported under its CPU interpreter (TRITON_INTERPRET=1)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def uses_triton(x: Tensor, *others: Tensor | None) -> bool:
    """True if an op on these tensors runs the Triton kernels, False if PyTorch.

    float64 tensors and rows wider than MAX_D take the PyTorch closed form on any device.
    """
    if not (x.is_cuda or interpreting()):
        return False
    if x.shape[-1] > MAX_D or compute_dtype(x, *others) == torch.float64:
        return False
    if triton is None:
        raise RuntimeError("CUDA tensors need Triton, which is not installed: pip install triton")
    return True


class LaunchConfig(NamedTuple):
    """Tile shape and launch options of one kernel launch.

    A program works on tiles of [rows, block]; a row is `chunks` tiles wide and
    shared by `splits` programs.
    """

    block: int
    rows: int
    warps: int
    chunks: int = 1
    splits: int = 1
    per_sm: int = 0  # programs per SM, where programs loop over rows
    stages: int = 1  # from 3 on, later rows are copied to shared memory in the meantime


# Fixed on purpose: a tuner at run time may choose differently on two ranks, and
# then their sums differ. Keyed by the power of two that holds a row; chosen from
# the compiled code (no spill, and loads in flight enough to cover the latency of
# memory). Speed: not yet measured.
#               rows, warps
_FORWARD = {
    1024: (2, 4),
    2048: (1, 4),
    4096: (1, 8),
    8192: (1, 8),
    16384: (1, 16),
}


class TilePlan(NamedTuple):
    """Backward launch settings for one row width, from which `planned` makes a LaunchConfig.

    splits = 0 loads whole rows; otherwise rows are read in chunks of 128 bits a thread.
    """

    warps: int
    per_sm: int
    splits: int = 0
    stages: int = 1
    rows: int = 1  # multiplies the number of rows in a tile


# Two gain gradients take a quarter of an SM's registers at 8192; at 16384 they
# would take half, and the compiler spills around them: two programs share the
# row. One takes half as many.
#               for one gain and for two
_BACKWARD = {
    1024: (TilePlan(4, 4), TilePlan(4, 4)),
    2048: (TilePlan(8, 2), TilePlan(8, 2)),
    4096: (TilePlan(8, 2, 1), TilePlan(8, 2, 1)),
    8192: (TilePlan(8, 2, 1), TilePlan(8, 1, 1)),
    16384: (TilePlan(8, 1, 1), TilePlan(8, 1, 2)),
}


def _power(d: int) -> int:
    return 1 << (d - 1).bit_length()


def forward_config(d: int) -> LaunchConfig:
    """Settings of a forward launch: whole rows, 16 to 32 values per thread."""
    block = _power(d)
    if block < 1024:
        return LaunchConfig(block, 2048 // block, 4)
    return LaunchConfig(block, *_FORWARD[block])


def backward_config(d: int, itemsize: int, gains: int) -> LaunchConfig:
    """Settings of a backward launch that also accumulates `gains` gain gradients."""
    return planned(d, itemsize, _BACKWARD[max(_power(d), 1024)][gains - 1])


def planned(d: int, itemsize: int, plan: TilePlan) -> LaunchConfig:
    """Settings of a backward launch for rows of width d and elements of `itemsize` bytes."""
    block, splits = _power(d), max(1, plan.splits)
    if not plan.splits:
        n_rows = plan.rows * max(1, 1024 // block)
        return LaunchConfig(block, n_rows, plan.warps, 1, 1, plan.per_sm, plan.stages)
    block = plan.warps * 32 * (16 // itemsize)
    chunks = -(-d // (block * splits)) * splits
    return LaunchConfig(block, 1, plan.warps, chunks, splits, plan.per_sm, plan.stages)


@functools.cache
def _cuda_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs(x: Tensor, config: LaunchConfig) -> int:
    """Number of programs (or groups of `splits`) that share the rows of x in a backward."""
    # A meta tensor stands for one on an H100 or H200. The interpreter gets few
    # programs, so that each goes round its loop more than once.
    sms = _cuda_sms(x.device.index) if x.is_cuda else 132 if x.is_meta else 2
    return min(-(-x.shape[0] // config.rows), config.per_sm * sms // config.splits)


class Launch(NamedTuple):
    """A kernel, its grid and its arguments by name (constexprs included)."""

    kernel: Any
    grid: int
    args: dict[str, Any]
    config: LaunchConfig

    @property
    def options(self) -> dict[str, int]:
        """Compiler options: the number of warps, and the registers a thread may use.

        ptxas by itself may stop at fewer registers than per_sm programs leave each
        thread, and spill; told the number, it does not.
        """
        options = {"num_warps": self.config.warps}
        if self.config.per_sm and torch.version.hip is None:
            threads = 32 * self.config.warps * self.config.per_sm
            options["maxnreg"] = min(255, REGISTERS // threads)
        return options

    def run(self, like: Tensor) -> None:
        """Launch on the device of `like`, whichever device is current; no rows, no launch."""
        if self.grid == 0:
            return
        guard = torch.cuda.device_of(like) if like.is_cuda else contextlib.nullcontext()
        with guard:
            self.kernel[(self.grid,)](**self.args, **self.options)


def forward_launch(kernel: Any, args: dict[str, Any], like: Tensor, config: LaunchConfig) -> Launch:
    """Build a launch with one program for each tile of the rows of `like`."""
    n_rows, d = like.shape
    args |= {"n_rows": n_rows, "D": d, "BLOCK": config.block, "ROWS": config.rows}
    return Launch(kernel, -(-n_rows // config.rows), args, config)


def backward_launch(
    whole: Any, wide: Any, args: dict[str, Any], groups: int, config: LaunchConfig
) -> Launch:
    """Build a launch whose programs loop over rows.

    `whole` is the kernel that holds whole rows in registers, `wide` the one that reads
    them in chunks; config decides.
    """
    kernel = whole if config.chunks == 1 else wide
    sizes = {
        "BLOCK": config.block, "ROWS": config.rows, "STAGES": config.stages,
        "n_chunks": config.chunks, "CHUNKS": config.chunks // config.splits,
        "SPLITS": config.splits,
    }  # fmt: skip
    args |= {name: size for name, size in sizes.items() if name in kernel.arg_names}
    return Launch(kernel, groups * config.splits, args, config)
