"""Address offsets of every launch, for nearly as many rows as 32 bits count; needs no GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
import triton
import triton.language as tl

from tests.helpers.kernel_modules import Config, Launch, aot, interpreting
from tests.helpers.offsets import largest_launches, overflows

pytestmark = pytest.mark.skipif(interpreting(), reason="TRITON_INTERPRET is set")


@pytest.mark.parametrize("d", [64, 768, 16384])  # many rows a program, one, and chunks of one
@pytest.mark.parametrize("op", aot.OPS)
def test_no_offset_overflows(op, d):
    for title, launch in largest_launches(op, d).items():
        assert overflows(launch) == [], title


@triton.jit(do_not_specialize=["n_rows"])
def _program_kernel(x_ptr, n_rows, D: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    tl.store(x_ptr + row * D + tl.arange(0, D), 0.0)


@triton.jit(do_not_specialize=["n_rows"])
def _loop_kernel(x_ptr, n_rows, D: tl.constexpr, WIDE: tl.constexpr):
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        # Otherwise widened too late, when the product has wrapped.
        base = tl.cast(row, tl.int64) * D if WIDE else (row * D).to(tl.int64)
        tl.store(x_ptr + base + tl.arange(0, D), 0.0)


@triton.jit(do_not_specialize=["n_rows"])
def _read_kernel(x_ptr, n_rows, D: tl.constexpr, WIDE: tl.constexpr):
    row = tl.load(x_ptr + tl.program_id(0))
    if WIDE:
        row = row.to(tl.int64)
    tl.store(x_ptr + row * D + tl.arange(0, D), 0)


@pytest.mark.parametrize("kernel", [_program_kernel, _loop_kernel, _read_kernel])
@pytest.mark.parametrize("wide", [True, False])
def test_planted_offsets_are_told_apart(kernel, wide):
    dtype = torch.int32 if kernel is _read_kernel else torch.float32
    x, rows = torch.empty(1, device="meta", dtype=dtype), 2**22
    grid = 132 if kernel is _loop_kernel else rows
    arguments = {"x_ptr": x, "n_rows": rows, "D": 1024, "WIDE": wide}
    faults = overflows(Launch(kernel, grid, arguments, Config(1024, 1, 4)))
    assert bool(faults) == (not wide), faults
