"""What every op on rows shares: input checks, the config table, the launch.

A row kernel sees its inputs as [rows, d]: everything but the last dimension is
flattened. Nothing here needs a GPU, and Triton may be absent (it ships for
Linux only): the kernels are then plain functions that nobody calls.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from deeploop.errors import InputError

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = types.SimpleNamespace(constexpr=int)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# n, the second result of an update: a Tensor, or None where it was called with norm=False.
Normed: TypeAlias = Any

# Widest row the Triton kernels are built and spill-checked for; wider rows take
# the PyTorch path.
MAX_D = 16384
REGISTERS = 65536  # of one SM, from sm_80 to sm_100


def jit(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit`, or nothing at all where Triton is absent."""
    if triton is None:
        return lambda fn: fn
    return triton.jit(**options)


@functools.cache
def interpreting() -> bool:
    """Whether Triton was loaded under its CPU interpreter (TRITON_INTERPRET=1)."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def uses_triton(x: Tensor, *others: Tensor | None) -> bool:
    """Whether an op on x and the other tensors runs on the Triton kernels.

    float64 and rows wider than MAX_D do not: they take the PyTorch closed form,
    on any device.
    """
    if not (x.is_cuda or interpreting()):
        return False
    if x.shape[-1] > MAX_D or compute_dtype(x, *others) == torch.float64:
        return False
    if triton is None:
        raise RuntimeError("CUDA tensors need Triton, which is not installed: pip install triton")
    return True


# ---------------------------------------------------------------------------
# Checks


def check_rows(op: str, **tensors: Tensor) -> None:
    """Refuse activations that differ in shape or device, or are not real floats."""
    names = list(tensors)
    first = tensors[names[0]]
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            allowed = ", ".join(str(t).removeprefix("torch.") for t in DTYPES)
            raise InputError(f"{op}: {name} has dtype {x.dtype}; allowed: {allowed}")
        if x.dim() == 0 or x.shape[-1] == 0:
            raise InputError(
                f"{op}: {name} has shape {list(x.shape)}; allowed: [..., d] with d at least 1"
            )
        if x.shape != first.shape:
            raise InputError(
                f"{op}: {name} has shape {list(x.shape)}; "
                f"allowed: the shape of {names[0]}, {list(first.shape)}"
            )
        if x.device != first.device:
            raise InputError(
                f"{op}: {name} is on {x.device}; allowed: the device of {names[0]}, {first.device}"
            )


def check_gains(op: str, like: Tensor, **gains: Tensor | None) -> None:
    """Refuse gains that are not one float per column on the device of `like`."""
    d = like.shape[-1]
    for name, w in gains.items():
        if w is None:
            continue
        if w.dtype not in DTYPES:
            allowed = ", ".join(str(t).removeprefix("torch.") for t in DTYPES)
            raise InputError(f"{op}: {name} has dtype {w.dtype}; allowed: {allowed}")
        if w.dim() != 1 or w.shape[0] != d:
            raise InputError(f"{op}: {name} has shape {list(w.shape)}; allowed: [{d}] or None")
        if w.device != like.device:
            raise InputError(
                f"{op}: {name} is on {w.device}; allowed: the device of the activations, "
                f"{like.device}"
            )


def check_numbers(op: str, eps: float, **factors: float) -> None:
    """Refuse an eps below zero and factors that are not finite.

    Called where an op runs, not where it is traced: a check on a traced float
    would compile the value in.
    """
    if not (math.isfinite(eps) and eps >= 0):
        raise InputError(f"{op}: eps is {eps}; allowed: a finite number, 0 or more")
    for name, value in factors.items():
        if not math.isfinite(value):
            raise InputError(f"{op}: {name} is {value}; allowed: a finite number")


def check_untraced(op: str, eps: float, **factors: float) -> None:
    """`check_numbers` at the door of an op whose factors are data; not while it is traced."""
    if not torch.compiler.is_compiling():
        check_numbers(op, eps, **factors)


def check_norm(op: str, norm: bool, w_next: Tensor | None) -> None:
    """Refuse a gain for a norm that is off."""
    if w_next is not None and not norm:
        raise InputError(f"{op}: w_next is given and norm is False; allowed: None without the norm")


# ---------------------------------------------------------------------------
# PyTorch side


def numbers(*values: float) -> Tensor:
    """Host numbers as one float64 tensor on CPU, for a custom op to read back.

    torch.compile guards on a float argument of an op, so each new value compiles
    anew; a tensor is data. A product is the form in which it traces a float as one.
    """
    if not torch.compiler.is_compiling():
        return torch.tensor(values, dtype=torch.float64, device="cpu")
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return torch.stack([one * value for value in values])


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if anything is float64, else float32: never a low-precision sum."""
    wide = any(t is not None and t.dtype == torch.float64 for t in tensors)
    return torch.float64 if wide else torch.float32


@contextlib.contextmanager
def no_autocast(x: Tensor) -> Iterator[None]:
    """Keep an enclosing autocast away from the ATen calls inside an op."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, enabled=False):
        yield


def count(x: Tensor) -> int:
    """How many rows x has; unlike numel() // d it stays exact for a traced shape."""
    return math.prod(x.shape[:-1])


def as_rows(x: Tensor) -> Tensor:
    """x as a contiguous [rows, d]; a copy only where x is strided or expanded."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def maybe_rows(x: Tensor | None) -> Tensor | None:
    """as_rows for an optional tensor."""
    return None if x is None else as_rows(x)


def found(shape: torch.Size | None, *gradients: Tensor | None) -> list[Tensor]:
    """The gradients that were asked for, in the given shape."""
    there = [g for g in gradients if g is not None]
    return there if shape is None else [g.view(shape) for g in there]


def packed(w: Tensor | None) -> Tensor | None:
    """A gain with its values side by side; a copy only where it is strided or expanded."""
    return None if w is None else w.contiguous()


def rstd(x: Tensor, eps: float, scale: Tensor | None = None) -> Tensor:
    """1 / sqrt(mean((scale * x)^2) + eps) per row, [rows, 1]; scale is [rows, 1]."""
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if scale is not None:
        size.mul_(scale)
    return size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def row_sum(x: Tensor, w: Tensor | None) -> Tensor:
    """Sum over each row of x * w, [rows, 1], without forming the product."""
    return x.sum(-1, keepdim=True) if w is None else torch.mv(x, w.to(x.dtype))[:, None]


def column_sum(x: Tensor, row_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over the rows of x * row_scale, [d]: a gain's gradient."""
    return torch.mv(x.T, row_scale.reshape(-1)).to(dtype)


def gain_gradient(found: Tensor | None, w: Tensor | None, need: bool) -> Tensor | None:
    """A gain's gradient where it is needed: partial sums [programs, d] are added up.

    Zero where nothing was found, for the norm's output was not used, or there are no rows.
    """
    if not need or w is None:
        return None
    if found is None:
        return torch.zeros_like(w)
    return (found.sum(0) if found.dim() == 2 else found).to(w.dtype)


# ---------------------------------------------------------------------------
# Triton side


class Config(NamedTuple):
    """How one launch is cut up.

    A program works on tiles of [rows, block]; a row is `chunks` tiles wide and
    shared by `splits` programs.
    """

    block: int
    rows: int
    warps: int
    chunks: int = 1
    splits: int = 1
    per_sm: int = 0  # programs per SM, where programs loop over rows
    stages: int = 1  # from 3 on, the rows to come are copied to shared memory meanwhile


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


class Plan(NamedTuple):
    """A backward launch for one width. splits 0: whole rows; else chunks of 128 bits a thread."""

    warps: int
    per_sm: int
    splits: int = 0
    stages: int = 1
    rows: int = 1  # times as many rows in a tile


# Two gain gradients take a quarter of an SM's registers at 8192; at 16384 they
# would take half, and the compiler spills around them: two programs share the
# row. One takes half as many.
#               for one gain and for two
_BACKWARD = {
    1024: (Plan(4, 4), Plan(4, 4)),
    2048: (Plan(8, 2), Plan(8, 2)),
    4096: (Plan(8, 2, 1), Plan(8, 2, 1)),
    8192: (Plan(8, 2, 1), Plan(8, 1, 1)),
    16384: (Plan(8, 1, 1), Plan(8, 1, 2)),
}


def _power(d: int) -> int:
    return 1 << (d - 1).bit_length()


def forward_config(d: int) -> Config:
    """The tile of a forward launch: whole rows, 16 to 32 values per thread."""
    block = _power(d)
    if block < 1024:
        return Config(block, 2048 // block, 4)
    return Config(block, *_FORWARD[block])


def backward_config(d: int, itemsize: int, gains: int) -> Config:
    """The tile of a backward launch, which also holds that many gain gradients."""
    return planned(d, itemsize, _BACKWARD[max(_power(d), 1024)][gains - 1])


def planned(d: int, itemsize: int, plan: Plan) -> Config:
    """The tile of a backward launch as a plan has it."""
    block, splits = _power(d), max(1, plan.splits)
    if not plan.splits:
        n_rows = plan.rows * max(1, 1024 // block)
        return Config(block, n_rows, plan.warps, 1, 1, plan.per_sm, plan.stages)
    block = plan.warps * 32 * (16 // itemsize)
    chunks = -(-d // (block * splits)) * splits
    return Config(block, 1, plan.warps, chunks, splits, plan.per_sm, plan.stages)


@functools.cache
def _cuda_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs(x: Tensor, config: Config) -> int:
    """How many programs (or groups of `splits`) share the rows of x in a backward launch."""
    # A meta tensor stands for one on an H100 or H200. The interpreter gets few
    # programs, so that each goes round its loop more than once.
    sms = _cuda_sms(x.device.index) if x.is_cuda else 132 if x.is_meta else 2
    return min(-(-x.shape[0] // config.rows), config.per_sm * sms // config.splits)


class Launch(NamedTuple):
    """A kernel, its grid and its arguments by name (constexprs included)."""

    kernel: Any
    grid: int
    args: dict[str, Any]
    config: Config

    @property
    def options(self) -> dict[str, int]:
        """How the compiler is called.

        Left alone ptxas may stop at fewer registers than per_sm programs leave each
        thread, and spill; told how many those are, it does not.
        """
        found = {"num_warps": self.config.warps}
        if self.config.per_sm and torch.version.hip is None:
            threads = 32 * self.config.warps * self.config.per_sm
            found["maxnreg"] = min(255, REGISTERS // threads)
        return found

    def run(self, like: Tensor) -> None:
        """Launch on the device of `like`, whichever device is current; no rows, no launch."""
        if self.grid == 0:
            return
        guard = torch.cuda.device_of(like) if like.is_cuda else contextlib.nullcontext()
        with guard:
            self.kernel[(self.grid,)](**self.args, **self.options)


def forward_launch(kernel: Any, args: dict[str, Any], like: Tensor, config: Config) -> Launch:
    """A launch with a program for each tile of the rows of `like`."""
    n_rows, d = like.shape
    args |= {"n_rows": n_rows, "D": d, "BLOCK": config.block, "ROWS": config.rows}
    return Launch(kernel, -(-n_rows // config.rows), args, config)


def backward_launch(
    held: Any, wide: Any, args: dict[str, Any], groups: int, config: Config
) -> Launch:
    """A launch whose programs loop over rows: held in registers, or in chunks, as config has it."""
    kernel = held if config.chunks == 1 else wide
    sizes = {
        "BLOCK": config.block, "ROWS": config.rows, "STAGES": config.stages,
        "n_chunks": config.chunks, "CHUNKS": config.chunks // config.splits,
        "SPLITS": config.splits,
    }  # fmt: skip
    args |= {name: size for name, size in sizes.items() if name in kernel.arg_names}
    return Launch(kernel, groups * config.splits, args, config)


def results(
    like: Tensor, fused: bool, build: Callable[..., Any], closed: Callable[..., Any], *args: Any
) -> Any:
    """What the launches that `build` makes fill in, or the closed form on the same arguments."""
    if fused:
        found, launches = build(*args)
        for launch in [launches] if isinstance(launches, Launch) else launches:
            launch.run(like)
        return found
    with no_autocast(like):
        return closed(*args)
