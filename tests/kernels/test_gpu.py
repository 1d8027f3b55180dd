"""The ops on rows on a CUDA device: the comparisons of the interpreter's tests, and more rows."""

import itertools

import pytest
import torch

from tests.helpers.kernel_cases import (
    CASES,
    FULL,
    chosen,
    compare,
    double,
    every_subset,
    make_gradients,
    make_inputs,
    run,
    same_bits,
    some_subsets,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_op = pytest.mark.parametrize("case", FULL, ids=str)
TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 2e-2, "atol": 8e-2},  # sums over 129 rows, rounded to bfloat16
    torch.float16: {"rtol": 3e-3, "atol": 1e-2},
}
# Nearly all the time goes into compiling; the interpreter's tests have more combinations.
SOME = {torch.float16: [96, 4096], torch.bfloat16: [7, 768, 4096, 8192, 16384]}
EVERY = [1, 7, 64, 96, 768, 1000, 4096, 5000, 8192, 16384, 20000]


@pytest.fixture(autouse=True)
def on_device():
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


@every_op
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches_reference(case, dtype):
    for d in SOME.get(dtype, EVERY):
        for n_rows in (0, 1, 129):
            inputs = make_inputs(case, (n_rows, d), dtype, gains=torch.float32)
            compare(case, inputs, make_gradients(case, inputs), **TOLERANCE[dtype])


@every_case
@pytest.mark.parametrize("d", [96, 4096])
def test_float32_memories_of_a_bfloat16_stream(case, d):
    wide = torch.float32
    inputs = make_inputs(case, (65, d), torch.bfloat16, gains=wide, memories=wide)
    compare(case, inputs, make_gradients(case, inputs), **TOLERANCE[torch.bfloat16])


@every_op
@pytest.mark.parametrize("d", [96, 4096])
def test_subsets_of_gradients(case, d):
    inputs = make_inputs(case, (65, d), torch.float32)
    gradients = make_gradients(case, inputs)
    # Each subset is a kernel to compile: all of them for one op of each kind.
    all_of = case.op in ("post_sandwich", "pre_norm")
    for used, needs in every_subset(case) if all_of else some_subsets(case):
        compare(case, inputs, chosen(gradients, used), needs, **TOLERANCE[torch.float32])


@every_op
@pytest.mark.parametrize("d", [96, 4096, 16384])
def test_same_bits_twice(case, d):
    inputs = make_inputs(case, (4099, d), torch.bfloat16, gains=torch.float32)
    gradients = make_gradients(case, inputs)
    assert same_bits(*(run(case.fused, inputs, gradients) for _ in range(2)))


@every_op
@pytest.mark.parametrize("d", [96, 20000])
def test_autocast_changes_nothing(case, d):
    """Neither for the kernels nor for the PyTorch path of wider rows."""
    inputs = make_inputs(case, (65, d), torch.float32)
    inputs[1] = inputs[1].bfloat16()
    gradients = make_gradients(case, inputs)
    plain = run(case.fused, inputs, gradients)
    with torch.autocast("cuda", torch.bfloat16):
        under = run(case.fused, inputs, gradients)
    assert same_bits(plain, under)


@every_op
def test_every_device_is_launched_on(case):
    """The tensors' device counts, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with torch.device("cuda:1"), torch.cuda.device(0):
        inputs = make_inputs(case, (5, 96), torch.float32)
        compare(case, inputs, make_gradients(case, inputs), **TOLERANCE[torch.float32])


@every_op
def test_offsets_past_two_to_the_31(case):
    """Every row holds the same values, so the last one must come out like the first."""
    n_rows, d = (1 << 31) // 16384 + 8, 16384
    tensors = 2 * (len(case.inputs) + len(case.results))
    if torch.cuda.mem_get_info()[0] < 2 * n_rows * d * tensors:
        pytest.skip(f"needs {4 * tensors} GiB of free device memory")
    one = make_inputs(case, (1, d), torch.bfloat16)
    gradients = [g.expand(n_rows, d).contiguous() for g in make_gradients(case, one)]
    inputs = [x if x.dim() == 1 else x.expand(n_rows, d).contiguous() for x in one]
    for y in itertools.chain.from_iterable(run(case.fused, inputs, gradients)):
        assert y.dim() == 1 or torch.equal(y[-1], y[0])


@every_op
def test_many_rows(case):
    """More rows than a wave of programs: the gains' gradients over all of them."""
    inputs = make_inputs(case, (20011, 1000), torch.float32)
    gradients = make_gradients(case, inputs)
    _, grads = run(case.fused, inputs, gradients)
    _, exact = run(case.reference, double(inputs), double(gradients))
    for name, g, e in zip(case.inputs, grads, exact, strict=True):
        error = (g.double() - e).norm() / e.norm()
        assert error < 1e-5, f"d{name}: relative error {error:.1e}"


@every_op
def test_new_coefficients_compile_no_kernel(case):
    """The coefficients of every loop and layer share one compiled kernel."""
    import triton

    inputs = make_inputs(case, (9, 96), torch.float32)
    gradients = make_gradients(case, inputs)
    run(case.fused, inputs, gradients)
    compiled = []
    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = lambda **details: compiled.append(details)
    try:
        for by in (0.0, 1.0, 2.0, 16.0):
            factors = dict.fromkeys(case.factors, by)
            run(lambda xs, f=factors: case.fused(xs, **f), inputs, gradients)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
    assert not compiled
