"""ATen operators: inputs read once, outputs written once, views free."""

import torch

from bench.harness.counting import count, distinct_bytes


def moved(run):
    with count() as steps:
        run()
    return [(s.name, sum(m.read for m in s.moved), sum(m.written for m in s.moved)) for s in steps]


def test_reads_and_writes():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    assert moved(lambda: x + y) == [("aten.add.Tensor", 256, 128)]
    assert moved(lambda: x.add_(y)) == [("aten.add_.Tensor", 256, 128)]
    assert moved(lambda: torch.add(x, y, out=torch.empty(8, 4))) == [("aten.add.out", 256, 128)]
    assert moved(lambda: x.sum(0)) == [("aten.sum.dim_IntList", 128, 16)]
    assert moved(lambda: x.half()) == [("aten._to_copy.default", 128, 64)]


def test_overwritten_is_not_read():
    x, y = torch.randn(8), torch.randn(8)
    assert moved(lambda: x.copy_(y)) == [("aten.copy_.default", 32, 32)]
    assert moved(lambda: x.zero_()) == [("aten.zero_.default", 0, 32)]
    assert moved(lambda: torch.zeros_like(x)) == [("aten.zeros_like.default", 0, 32)]


def test_views_and_allocations_are_free():
    x = torch.randn(8, 4)
    assert moved(lambda: x.T.reshape(4, 8).detach()[1:].unsqueeze(0).expand(3, 3, 8)) == []
    assert moved(lambda: torch.empty_like(x)) == []
    assert moved(lambda: x.contiguous().view(-1)) == []
    assert moved(lambda: x.T.contiguous()) == [("aten.clone.default", 128, 128)]


def test_an_expanded_tensor_holds_what_it_holds():
    x = torch.randn(4)
    assert distinct_bytes(x.expand(100, 4)) == 16
    assert distinct_bytes(torch.empty(0, 4)) == 0
    assert distinct_bytes(torch.empty(())) == 4
    assert moved(lambda: x.expand(100, 4) * 2) == [("aten.mul.Tensor", 16, 1600)]


def test_backward_counts():
    x = torch.randn(8, requires_grad=True)
    with count() as steps:
        y = x * 3.0
    with count() as backward:
        torch.autograd.grad(y, x, torch.ones(8))
    assert [s.name for s in steps] == ["aten.mul.Tensor"]
    assert "aten.mul.Tensor" in [s.name for s in backward]
