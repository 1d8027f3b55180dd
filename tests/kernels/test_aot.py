"""The machine-code gate passes the kernels and fails what it is there to fail."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
import triton
import triton.language as tl

from tests.helpers.kernel_modules import Config, Launch, aot, interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="TRITON_INTERPRET is set")


def test_kernels_pass(capsys):
    """One op through the command, which compiles in processes of its own."""
    assert aot.main(["--d", "1024", "--dtype", "bf16", "--op", "pre_norm"]) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line[:18].strip() for line in lines] == ["pre_norm forward", "pre_norm backward"]


@pytest.mark.parametrize("op", [name for name in aot.OPS if name not in aot.FEW])
def test_wide_rows_spilled_on_an_a100_with_other_launches(op):
    """The backwards alone, which hold the most; the command itself compiles all for sm_90."""
    for title, _, report in aot.inspect(aot.Task(op, 12288, "fp32", 80, "backward")):
        assert report.failures(12288, 80, aot.least_share(op)) == [], title


@pytest.mark.parametrize("d", [64, 768, 3072, 5120, 16384])
def test_programs_get_the_registers_they_share_an_sm_by(d):
    for op in aot.OPS:
        for launch in aot.Task(op, d, "bf16", 90, "").launches().values():
            limit, per_sm = launch.options.get("maxnreg"), launch.config.per_sm
            assert (limit is None) == (per_sm == 0)
            assert limit is None or limit * 32 * launch.config.warps * per_sm <= 65536


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


@triton.jit
def _pipelined_kernel(x_ptr, y_ptr, D: tl.constexpr):
    o = tl.arange(0, D)
    b_sum = tl.zeros((D,), tl.float32)
    for i in tl.range(0, 9, num_stages=6):
        b_sum += tl.load(x_ptr + i * D + o)
    tl.store(y_ptr + o, b_sum)


@pytest.mark.parametrize(
    ("kernel", "d", "warps", "message"),
    [
        (_atomic_kernel, 1024, 4, "atomics"),
        (_spilling_kernel, 32768, 4, "spills"),
        (_scalar_kernel, 1024, 4, "128-bit"),
        (_pipelined_kernel, 16384, 16, "shared memory"),
    ],
)
def test_planted_faults_are_refused(kernel, d, warps, message):
    x = torch.empty(4 * d, device="meta")
    arguments = {"x_ptr": x, "y_ptr": x, "D": d}
    launch = Launch(kernel, 1, arguments, Config(d, 1, warps))
    failures = aot.read(aot.compile_launch(launch, 90)).failures(d, 90)
    assert any(message in failure for failure in failures), failures
