"""All contenders of the kernels compute the same function."""

import pytest
import torch

from bench.harness.timing import relative_error
from bench.kernels.ops import OPS, contenders
from bench.suites.bench_kernels import Runner, exact_results
from deeploop import kernels


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_agree_with_the_reference(op, dtype, tolerance):
    torch.manual_seed(0)
    inputs = op.make_inputs(13, 96, dtype, "cpu")
    gradients, exact = exact_results(op, inputs, dtype)
    found, missing = contenders(op)
    for contender in found:
        if contender.name in ("liger", "apex"):
            continue  # CUDA kernels
        runner = Runner(op, contender, inputs, None)
        runner.set_gradients(gradients)
        assert runner.wrong(exact, tolerance) is None, contender.name
    assert {c.name for c in found} | set(missing) >= {"ours", "eager", "naive", "liger", "apex"}


def test_a_wrong_contender_is_named():
    (op,) = (op for op in OPS if op.name == "pre_norm")
    inputs = op.make_inputs(5, 32, torch.float32, "cpu")
    gradients, exact = exact_results(op, inputs, torch.float32)
    runner = Runner(op, contenders(op)[0][0], inputs, None)
    runner.set_gradients([g * 1.001 for g in gradients])
    assert runner.wrong(exact, 1e-5).startswith("gradient")
    exact[0] = exact[0] + 0.01
    assert runner.wrong(exact, 1e-5).startswith("output 0")
    exact[0] = exact[0] * float("nan")
    assert runner.wrong(exact, 1e-5).startswith("output 0")


def test_every_op_of_the_package_is_timed():
    helpers = {"looping_carry", "looping_coefficients", "two_memory_coefficients"}
    assert {op.name for op in OPS} == set(kernels.__all__) - helpers


def test_relative_error():
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x, x) == 0
    assert relative_error(x * 1.1, x) == pytest.approx(0.1)
    assert not relative_error(x * float("nan"), x) <= 1.0
