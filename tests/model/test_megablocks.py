"""Routed experts on megablocks, whose compiled operators are replaced by plain ones."""

import importlib.util
import types

import pytest
import torch

from deeploop.utils.errors import InputError
from tests.helpers.moe_layer import EXACT, dense, inputs_for, make, ours, results


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_says_what_megablocks_needs():
    if importlib.util.find_spec("megablocks_ops"):
        pytest.skip("megablocks is installed with its extension")
    with pytest.raises(InputError, match=r"backend='megablocks': cannot be used here .* install"):
        make(backend="megablocks", f=32)
    with pytest.raises(InputError, match="d_expert=4: megablocks needs"):
        make(backend="megablocks")


def stand_in(monkeypatch, name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(__import__("sys").modules, name, module)
    return module


def compiled_ops():
    """megablocks' CUDA extension in PyTorch."""

    def sort(x, end_bit, out, order):
        values, indices = x.sort(stable=True)
        out.copy_(values), order.copy_(indices)

    return {
        "sort": sort,
        "histogram": lambda x, n: torch.bincount(x, minlength=n).int(),
        "inclusive_cumsum": lambda x, dim, out: out.copy_(x.cumsum(dim)),
    }


def gmm(x, w, batch_sizes, trans_b=False):
    parts = x.split(batch_sizes.tolist())
    return torch.cat([a @ (b.T if trans_b else b) for a, b in zip(parts, w, strict=True)])


def gather(x, indices, bin_ids, weights, bins, top_k):
    rows = x[indices.long() // top_k]
    return rows if weights is None else rows * weights[indices.long(), None]


def scatter(x, indices, bin_ids, weights, bins, top_k):
    out = torch.empty_like(x)
    out[indices.long()] = x if weights is None else x * weights[indices.long(), None]
    return out.view(-1, top_k, x.shape[1]).sum(1)


def scatter_wgrad(x, grad, indices, bin_ids, bins, top_k):
    out = x.new_empty(len(x))
    out[indices.long()] = (x * grad[indices.long() // top_k]).sum(-1)
    return out


@pytest.mark.skipif(
    not importlib.util.find_spec("megablocks") or bool(importlib.util.find_spec("megablocks_ops")),
    reason="needs megablocks' Python source on PYTHONPATH (and stanford-stk), without its "
    "CUDA extension",
)
@pytest.mark.parametrize("capacity", [0.0, 0.6])
def test_megablocks_computes_the_same(monkeypatch, capacity):
    """Its layer, permutation and GLU in its own Python; what it compiles is stood in for.

    The CUDA extension, grouped_gemm and its Triton copies are PyTorch here, so this
    says that weights, indices and layouts are handed over right, and nothing of its
    kernels.
    """
    stand_in(monkeypatch, "megablocks_ops", **compiled_ops())
    ops = types.SimpleNamespace(gmm=gmm)
    stand_in(monkeypatch, "grouped_gemm", ops=ops, backend=ops)
    kernels = importlib.import_module("megablocks.backend.kernels")
    for function in (gather, scatter, scatter_wgrad):
        monkeypatch.setattr(kernels, function.__name__, function)
    theirs, inputs = make(backend="megablocks", capacity=capacity, f=32), inputs_for(3, 5, 6)
    plain = make(capacity=capacity, f=32)
    plain.load_state_dict(theirs.state_dict())
    assert dict(theirs.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    actual, expected = results(ours, theirs, inputs), results(dense, theirs, inputs)
    torch.testing.assert_close(actual, expected, **EXACT)
    assert theirs(inputs[1], 1).expert_out.shape == (15, 6)
