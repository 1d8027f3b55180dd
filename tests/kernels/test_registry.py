"""The table of ops describes the ops as they are, and nothing is missing from it."""

import inspect
import subprocess
import sys

import pytest
import torch

import deeploop.model.moe.experts  # noqa: F401  # defines the operator `experts`
from deeploop import kernels
from deeploop.kernels import reference, registry

HELPERS = {"looping_carry", "looping_coefficients", "two_memory_coefficients"}


def test_the_package_exports_the_ops_of_the_table():
    assert set(kernels.__all__) == set(registry.OPS) | HELPERS


@pytest.mark.parametrize("op", registry.OPS.values(), ids=lambda op: op.name)
def test_arguments_are_the_functions_first_ones(op):
    for module in (kernels, reference):
        names = list(inspect.signature(getattr(module, op.name)).parameters)
        assert tuple(names[: len(op.arguments)]) == op.arguments


@pytest.mark.parametrize("op", registry.OPS.values(), ids=lambda op: op.name)
def test_launches_are_found_under_the_title(op):
    launches = op.launches(torch.empty(64, 32, device="meta"), torch.empty(32, device="meta"))
    title = op.title or op.name
    assert any(name.startswith(title) for name in launches)
    kernels_run = {launch.kernel.__name__ for launch in launches.values()}
    assert any(name.startswith(op.operator) for name in kernels_run)


def test_every_operator_is_in_the_table_and_every_ops_operator_exists():
    defined = {
        name.removeprefix(registry.NAMESPACE).removesuffix("_backward")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(registry.NAMESPACE)
    }
    assert defined == set(registry.OPERATORS)
    assert {op.operator for op in registry.OPS.values()} == defined - {"experts"}


def test_components_of_operators():
    assert registry.component("deeploop::sigmoid_router_backward") == "router"
    assert registry.component("deeploop::experts") == "experts"
    assert registry.component("deeploop::linear_update") == "updates"
    assert registry.component("aten::mm") == ""


def test_floor_counts_the_rows_of_a_tokens_experts():
    assert registry.OPS["expert_combine"].floor(4) == (8, 14)
    assert registry.OPS["post_sandwich"].floor(4) == (4, 6)


def test_names_are_printed_for_scripts():
    command = [sys.executable, "-m", "deeploop.kernels.registry"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(registry.OPS) and not done.stderr
