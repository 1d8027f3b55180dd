"""The machine-code gate passes the kernels and fails what it is there to fail."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
import triton
import triton.language as tl

from deeploop.kernels import aot, rows

pytestmark = pytest.mark.skipif(rows.interpreting(), reason="TRITON_INTERPRET is set")


def test_kernels_pass(capsys):
    assert aot.main(["--d", "1024", "--dtype", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("post_sandwich forward", "post_sandwich backward", "pre_norm backward"):
        assert any(line.startswith(name) for line in lines)


@pytest.mark.parametrize("op", aot.OPS, ids=lambda op: op.__name__.rpartition(".")[2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_widest_rows_do_not_spill(op, dtype):
    x = torch.empty(4096, rows.MAX_D, dtype=dtype, device="meta")
    for launch in op.aot_launches(x, torch.empty(rows.MAX_D, device="meta")).values():
        report = aot.read_cubin(aot.compile_launch(launch, 90))
        assert report.failures(rows.MAX_D, aot.least_share(op)) == []


@triton.jit
def _atomic_kernel(x_ptr, y_ptr, D: tl.constexpr):
    o = tl.arange(0, D)
    tl.atomic_add(y_ptr + o, tl.load(x_ptr + o))


@triton.jit
def _spilling_kernel(x_ptr, y_ptr, D: tl.constexpr):
    o = tl.arange(0, D)
    b_a = tl.load(x_ptr + o)
    b_b = tl.load(x_ptr + D + o)
    total = tl.sum(b_a * b_b)
    tl.store(y_ptr + o, b_a * total)
    tl.store(y_ptr + D + o, b_b * total)


@triton.jit
def _scalar_kernel(x_ptr, y_ptr, D: tl.constexpr):
    o = tl.arange(0, D) * 3
    tl.store(y_ptr + o, tl.load(x_ptr + o))


@pytest.mark.parametrize(
    ("kernel", "d", "warps", "message"),
    [
        (_atomic_kernel, 1024, 4, "atomics"),
        (_spilling_kernel, 32768, 4, "spills"),
        (_scalar_kernel, 1024, 4, "128-bit"),
    ],
)
def test_planted_faults_are_refused(kernel, d, warps, message):
    x = torch.empty(4 * d, device="meta")
    arguments = {"x_ptr": x, "y_ptr": x, "D": d}
    launch = rows.Launch(kernel, 1, arguments, rows.Config(d, 1, warps))
    failures = aot.read_cubin(aot.compile_launch(launch, 90)).failures(d)
    assert any(message in failure for failure in failures), failures
