"""What the kernel tests share: the ops by name, inputs, and one way to run them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeploop import kernels
from deeploop.kernels import reference

EPS = 1e-3


class Op(NamedTuple):
    name: str
    inputs: tuple[str, ...]  # h, f, then the gains
    factor: float  # alpha or scale

    @property
    def fused(self) -> Callable[..., Any]:
        return getattr(kernels, self.name)

    @property
    def reference(self) -> Callable[..., Any]:
        return getattr(reference, self.name)


OPS = [
    Op("post_sandwich", ("h", "f", "w_out", "w_next"), 2.5),
    Op("pre_norm", ("h", "f", "w_next"), 0.7),
]


def make_inputs(
    op: Op, shape: Sequence[int], dtype: torch.dtype, gain_dtype: torch.dtype | None = None
) -> list[Tensor]:
    h, f = (torch.randn(*shape).to(dtype) for _ in range(2))
    gains = [torch.rand(shape[-1]).add(0.5).to(gain_dtype or dtype) for _ in op.inputs[2:]]
    return [h, f, *gains]


def make_gradients(inputs: Sequence[Tensor]) -> list[Tensor]:
    h, f = inputs[:2]
    return [torch.randn(h.shape).to(h.dtype), torch.randn(f.shape).to(f.dtype)]


def subsets(op: Op) -> Iterator[tuple[bool, ...]]:
    """Every choice of inputs that need a gradient, but the empty one."""
    return (s for s in itertools.product((False, True), repeat=len(op.inputs)) if any(s))


def run(
    fn: Callable[..., Any],
    op: Op,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool] | None = None,
    eps: float = EPS,
) -> list[Tensor | None]:
    """h', n and the gradient of each input (None where none was asked for)."""
    needs = [x is not None for x in inputs] if needs is None else needs
    leaves = [
        None if x is None else x.detach().requires_grad_(need)
        for x, need in zip(inputs, needs, strict=True)
    ]
    outputs = fn(*leaves, op.factor, eps)
    used = [
        (y, g) for y, g in zip(outputs, gradients, strict=True) if g is not None and y.requires_grad
    ]
    torch.autograd.backward([y for y, _ in used], [g for _, g in used])
    return [*(y.detach() for y in outputs), *(None if x is None else x.grad for x in leaves)]


def double(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in tensors]


def compare(
    op: Op,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool] | None = None,
    eps: float = EPS,
    **tolerance: float,
) -> None:
    """The op against the reference in float64: values, every gradient, dtypes and shapes."""
    actual = run(op.fused, op, inputs, gradients, needs, eps)
    expected = run(op.reference, op, double(inputs), double(gradients), needs, eps)
    like = [*inputs[:2], *inputs]
    names = ["h'", "n", *(f"d{name}" for name in op.inputs)]
    for name, a, e, x in zip(names, actual, expected, like, strict=True):
        if e is None:
            # The reference knows that h' does not depend on w_next; a zero says the same.
            assert a is None or not a.any(), f"{name}: expected no gradient"
            continue
        assert a is not None and x is not None, f"{name} is missing"
        assert a.dtype == x.dtype and a.shape == x.shape, f"{name}: {a.dtype} {list(a.shape)}"
        torch.testing.assert_close(
            a.double(), e, **tolerance, msg=lambda text, name=name: f"{op.name} {name}: {text}"
        )
