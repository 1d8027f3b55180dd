"""The Triton kernels of the ops on rows: values and gradients, at every width and dtype."""

import pytest
import torch

from tests.helpers.kernel_cases import (
    FULL,
    Case,
    compare,
    compare_overflow,
    make_gradients,
    make_inputs,
)

pytestmark = pytest.mark.usefixtures("launches")
every_op = pytest.mark.parametrize("case", FULL, ids=str)
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 3e-5},
    torch.float16: {"rtol": 4e-3, "atol": 1e-2},
    # The interpreter truncates on the way to bfloat16: one unit in the last place.
    torch.bfloat16: {"rtol": 2**-7, "atol": 6e-2},
}


def check(case, n_rows, d, dtype=torch.float32, **dtypes):
    inputs = make_inputs(case, (n_rows, d), dtype, **dtypes)
    compare(case, inputs, make_gradients(case, inputs), **TOLERANCE[dtype])


@every_op
@pytest.mark.parametrize("d", [1, 7, 64, 96, 768, 2050, 4096])
def test_matches_reference(case, d):
    for n_rows in (0, 3, 19) if d < 100 else (3,):  # 1 row: test_some_subsets_of_gradients
        check(case, n_rows, d)
    if d in (7, 96, 2050):
        check(case, 2, d, torch.float16)


@every_op
@pytest.mark.parametrize("d", [5000, 9000])
def test_wide_rows(case, d):
    """Chunks that do not divide the row, rows shared by two programs, memories stored early."""
    check(case, 2, d)
    if "local" in case.inputs and d > 8192:
        check(case, 2, d, torch.float16, memories=torch.float32)


@pytest.mark.parametrize("case", [Case("post_sandwich"), Case("looping_update")], ids=str)
def test_the_widest_row(case):
    """Of each of the two kinds of kernels that take rows in chunks."""
    check(case, 1, 16384)


@every_op
@pytest.mark.parametrize(("n_rows", "d"), [(65, 96), (9, 1000), (5, 4096)])
def test_programs_share_the_rows(case, n_rows, d, launches):
    """Fewer programs than tiles of rows, and more tiles than a multiple of either."""
    check(case, n_rows, d)
    backward = launches[-1].launch
    tiles = -(-n_rows // backward.config.rows)
    assert 1 < backward.grid < tiles and tiles % backward.grid


@every_op
@pytest.mark.parametrize("d", [96, 4096])
def test_bfloat16(case, d):
    for memories in (torch.float32, torch.bfloat16):
        if memories == torch.bfloat16 or "local" in case.inputs:
            check(case, 3, d, torch.bfloat16, gains=torch.float32, memories=memories)


@every_op
@pytest.mark.parametrize("d", [96, 2050])
def test_another_eps(case, d):
    inputs = make_inputs(case, (3, d), torch.float32)
    gradients = make_gradients(case, inputs)
    compare(case, inputs, gradients, eps=0.5, **TOLERANCE[torch.float32])


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@every_op
@pytest.mark.parametrize("d", [96, 4096])
def test_overflow_is_that_of_eager(case, d):
    compare_overflow(case, 2, d, 1e19)


def test_float64_takes_the_exact_path(launches):
    case = Case("post_sandwich")
    inputs = make_inputs(case, (3, 5), torch.float64)
    compare(case, inputs, make_gradients(case, inputs), rtol=1e-11, atol=1e-11)
    assert not launches
    check(case, 1, 4)
