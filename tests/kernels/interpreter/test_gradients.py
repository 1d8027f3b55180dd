"""The Triton kernels of the ops on rows: optional tensors, subsets of gradients, layouts."""

import pytest
import torch

from tests.helpers.kernel_cases import (
    CASES,
    FULL,
    LAYOUTS,
    Case,
    chosen,
    compare,
    every_subset,
    make_gradients,
    make_inputs,
    run,
    same_bits,
    some_subsets,
)

pytestmark = pytest.mark.usefixtures("launches")
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_op = pytest.mark.parametrize("case", FULL, ids=str)
CLOSE = {"rtol": 1e-5, "atol": 3e-5}


@every_case
@pytest.mark.parametrize(("n_rows", "d"), [(19, 96), (1, 9000)])
def test_writes_each_result_once_and_nothing_else(case, n_rows, d, launches):
    inputs = make_inputs(case, (n_rows, d), torch.float32)
    gradients = make_gradients(case, inputs)
    launches.clear()
    compare(case, inputs, gradients, **CLOSE)
    statistics = ("n" in case.results) + case.op.endswith("sandwich")
    written = sum(len(recorded.written) for recorded in launches)
    assert written == len(case.results) + statistics + len(case.inputs)


def check_subsets(case, d, choices):
    inputs = make_inputs(case, (1, d), torch.float32)
    gradients = make_gradients(case, inputs)
    for used, needs in choices:
        compare(case, inputs, chosen(gradients, used), needs, **CLOSE)


@every_case
def test_some_subsets_of_gradients(case):
    check_subsets(case, 20, some_subsets(case))


@pytest.mark.parametrize("case", [Case("post_sandwich"), Case("looping_update")], ids=str)
def test_some_subsets_of_gradients_of_wide_rows(case):
    """Of the two kinds of kernels that take rows in chunks."""
    check_subsets(case, 2050, some_subsets(case))


@pytest.mark.parametrize("case", [Case("post_sandwich"), Case("pre_norm")], ids=str)
def test_every_subset_of_gradients(case):
    """Of the two kinds of kernels: those with a norm of the branch and the linear ones."""
    check_subsets(case, 20, every_subset(case))


@every_op
def test_strided_and_expanded(case):
    inputs = make_inputs(case, (2, 3, 20), torch.float32)
    gradients = make_gradients(case, inputs)
    for change in LAYOUTS.values():
        compare(case, [*map(change, inputs)], [*map(change, gradients)], **CLOSE)
    one = torch.ones(()).expand(2, 3, 20)
    compare(case, inputs, [one] * len(gradients), **CLOSE)


@every_op
@pytest.mark.parametrize("d", [96, 4096])
def test_same_bits_twice_and_nothing_given_is_written(case, d):
    inputs = make_inputs(case, (19 if d < 100 else 5, d), torch.float32)
    gradients = make_gradients(case, inputs)
    before = [x.clone() for x in (*inputs, *gradients)]
    assert same_bits(*(run(case.fused, inputs, gradients) for _ in range(2)))
    assert all(torch.equal(x, y) for x, y in zip((*inputs, *gradients), before, strict=True))
