"""The counter on kernels whose bytes are known by hand."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

from bench.harness.counting import count


@triton.jit
def masked_copy(x, y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o, mask=o < n, other=0.0), mask=o < n)


@triton.jit
def shared_row(x, row, y, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    b = tl.load(row + o) + tl.load(row + o)
    tl.store(y + tl.program_id(0) * BLOCK + o, b)


@triton.jit
def strided(x, y, scale, STEP: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    tl.store(y + o, tl.load(x + o * STEP) * scale)


@triton.jit
def scalar_mask(x, slot, y, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    m_slot = (n > 0) & (tl.load(slot, mask=n > 0, other=-1) >= 0)
    m = (o < n) & m_slot
    tl.store(y + o, tl.load(x + o, mask=m), mask=m)


@triton.jit
def scalar_and_atomic(x, total):
    tl.atomic_add(total, tl.load(x + tl.program_id(0)))


def only(steps):
    (step,) = steps
    return step, {m.name: m for m in step.moved}


def test_masked_tail():
    x, y = torch.randn(100), torch.empty(100)
    with count() as steps:
        masked_copy[(2,)](x, y, 100, BLOCK=64)
    step, moved = only(steps)
    assert step.kernel and step.name == "masked_copy"
    assert (moved["x"].read, moved["x"].written) == (400, 0)
    assert (moved["y"].read, moved["y"].written) == (0, 400)
    assert step.unique == step.requested == 800
    assert torch.equal(x, y)


def test_repeated_reads_are_requested_but_unique_once():
    row, y = torch.randn(16), torch.empty(5, 16)
    with count() as steps:
        shared_row[(5,)](row, row, y, BLOCK=16)
    _, moved = only(steps)
    shared = moved["x=row"]  # one storage, two arguments
    assert shared.read == 64
    assert shared.read_requested == 5 * 2 * 64
    assert moved["y"].written == moved["y"].written_requested == 5 * 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int64], ids=str)
def test_strided(dtype):
    x, y = torch.ones(3 * 32, dtype=dtype), torch.empty(32, dtype=dtype)
    with count() as steps:
        strided[(1,)](x, y, 1, STEP=3, BLOCK=32)
    _, moved = only(steps)
    assert moved["x"].read == moved["y"].written == 32 * dtype.itemsize


def test_a_view_counts_by_its_own_addresses():
    store = torch.randn(4, 32)
    with count() as steps:
        strided[(1,)](store[1], store[3], 2.0, STEP=1, BLOCK=32)
    _, moved = only(steps)
    assert moved["x=y"].read == moved["x=y"].written == 128
    assert torch.equal(store[3], store[1] * 2)


@pytest.mark.parametrize(("slot", "lanes"), [(3, 20), (-1, 0)])
def test_a_mask_made_with_a_scalar(slot, lanes):
    """The interpreter keeps such masks as integers."""
    x, y = torch.randn(32), torch.empty(32)
    with count() as steps:
        scalar_mask[(1,)](x, torch.tensor([slot]), y, 20, BLOCK=32)
    step, moved = only(steps)
    assert moved["slot"].read == 8
    assert step.unique == 8 + 2 * 4 * lanes


def test_scalars_and_atomics():
    x, total = torch.randn(3), torch.zeros(1)
    with count() as steps:
        scalar_and_atomic[(3,)](x, total)
    _, moved = only(steps)
    assert moved["x"].read == 12
    assert moved["total"].read == moved["total"].written == 4
    assert moved["total"].requested == 3 * 8


def test_float_arguments_are_float32_as_in_a_launch():
    x, y = torch.ones(4), torch.empty(4)
    with count():
        strided[(1,)](x, y, 0.1, STEP=1, BLOCK=4)
    assert y[0].item() == np.float32(0.1)


@pytest.mark.parametrize("n", [101, 1 << 20])
def test_out_of_bounds_is_refused(n):
    """A load past the end of every tensor, before it is executed."""
    x, y = torch.randn(100), torch.empty(100)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="outside x, y"), count():
        masked_copy[(4,)](x, y, n, BLOCK=64)


def test_the_interpreter_is_restored():
    before = interpreter.GridExecutor, interpreter._implicit_cvt
    with count():
        pass
    assert (interpreter.GridExecutor, interpreter._implicit_cvt) == before
    assert not any(name.startswith("create_") for name in vars(interpreter.interpreter_builder))
    with count() as steps:
        pass
    masked_copy[(1,)](torch.ones(4), torch.empty(4), 4, BLOCK=4)
    assert steps == []
