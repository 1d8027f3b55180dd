"""The Triton kernels of branch_sandwich, inject and looping_update, through autograd."""

import importlib

import pytest
import torch
from update_cases import (
    CASES,
    MAIN,
    compare,
    make_gradients,
    make_inputs,
    run,
    some_used,
    subsets,
)

pytestmark = pytest.mark.usefixtures("kernels_run")
every_case = pytest.mark.parametrize("case", CASES, ids=str)
main_cases = pytest.mark.parametrize("case", MAIN, ids=str)
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 3e-5},
    torch.float16: {"rtol": 4e-3, "atol": 1e-2},
    # The interpreter truncates on the way to bfloat16: one unit in the last place.
    torch.bfloat16: {"rtol": 2**-7, "atol": 6e-2},
}


def check(case, n_rows, d, dtype=torch.float32, **dtypes):
    inputs = make_inputs(case, (n_rows, d), dtype, **dtypes)
    compare(case, inputs, make_gradients(case, inputs), **TOLERANCE[dtype])


@main_cases
@pytest.mark.parametrize("d", [1, 7, 64, 96, 768, 1000, 4096])
def test_matches_reference(case, d):
    # The interpreter takes seconds per hundred wide rows.
    for n_rows in (0, 1, 3, 129) if d < 100 else (0, 3):
        check(case, n_rows, d)
    check(case, 3, d, torch.float16)


@main_cases
@pytest.mark.parametrize("d", [96, 2050])
def test_another_eps(case, d):
    inputs = make_inputs(case, (3, d), torch.float32)
    gradients = make_gradients(case, inputs)
    compare(case, inputs, gradients, eps=0.5, **TOLERANCE[torch.float32])


@main_cases
@pytest.mark.parametrize("d", [9000, 16384])
def test_wide_rows(case, d):
    """Rows shared by two programs, and memories stored before h is read."""
    check(case, 2, d)
    if "local" in case.inputs:
        check(case, 2, d, torch.float16, memories=torch.float32)


@main_cases
@pytest.mark.parametrize("memories", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [96, 4096])
def test_bfloat16(case, d, memories):
    check(case, 5, d, torch.bfloat16, gains=torch.float32, memories=memories)


@pytest.mark.parametrize(
    ("case", "d"), [*((c, 20) for c in CASES), *((c, 2050) for c in MAIN)], ids=str
)
def test_some_subsets_of_gradients(case, d):
    """Each input alone with all results used, and each result alone with all inputs."""
    inputs = make_inputs(case, (1, d), torch.float32)
    every = make_gradients(case, inputs)
    for used in some_used(len(every)):
        gradients = [g if u else None for g, u in zip(every, used, strict=True)]
        for needs in subsets(len(inputs)):
            if all(needs) or (all(used) and sum(needs) == 1):
                compare(case, inputs, gradients, needs, **TOLERANCE[torch.float32])


@main_cases
def test_strided_and_expanded(case):
    inputs = make_inputs(case, (2, 3, 20), torch.float32)
    gradients = make_gradients(case, inputs)
    for change in (
        lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: x[:1].expand(x.shape),
        lambda x: x.flatten()[:1].expand(x.shape),
    ):
        changed = [[*map(change, tensors)] for tensors in (inputs, gradients)]
        compare(case, *changed, **TOLERANCE[torch.float32])
    one = torch.ones(()).expand(2, 3, 20)
    compare(case, inputs, [one] * len(gradients), **TOLERANCE[torch.float32])


@main_cases
@pytest.mark.parametrize("d", [96, 4096])
def test_same_bits_twice_and_nothing_given_is_written(case, d):
    inputs = make_inputs(case, (19 if d < 100 else 5, d), torch.float32)
    gradients = make_gradients(case, inputs)
    before = [x.clone() for x in (*inputs, *gradients)]
    first, second = (run(case.fused, inputs, gradients) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert all(torch.equal(x, y) for x, y in zip((*inputs, *gradients), before, strict=True))


@every_case
@pytest.mark.parametrize(("n_rows", "d"), [(1, 7), (19, 96), (3, 2050), (1, 9000)])
def test_no_write_out_of_bounds(case, n_rows, d, guard):
    inputs = make_inputs(case, (n_rows, d), torch.float32)
    gradients = make_gradients(case, inputs)
    buffers = guard()
    compare(case, inputs, gradients, **TOLERANCE[torch.float32])
    statistics = ("n" in case.results) + case.op.endswith("sandwich")
    assert len(buffers) == len(case.results) + statistics + len(case.inputs)


@pytest.mark.parametrize("name", ["branch_sandwich", "inject", "looping_update"])
@pytest.mark.parametrize(("n_rows", "d"), [(37, 1000), (13, 4096)])
def test_programs_share_the_rows(name, n_rows, d):
    """Fewer programs than rows, and more rows than a multiple of either."""
    module = importlib.import_module(f"deeploop.kernels.{name}")
    x = torch.zeros(n_rows, d)
    launch = module.aot_launches(x, torch.ones(d))[f"{name} backward"]
    assert 1 < launch.grid < n_rows and n_rows % launch.grid
    launch.run(x)
