"""The updates with more inputs or results than h, f and h', n, as cases the tests run over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from kernel_cases import EPS, double
from torch import Tensor

from deeploop import kernels
from deeploop.kernels import reference

ARGUMENTS = {
    "post_sandwich": ("h", "f", "w_out", "w_next"),
    "pre_norm": ("h", "f", "w_next"),
    "branch_sandwich": ("h", "f", "w_branch", "w_next"),
    "inject": ("h", "x", "w_next"),
    "looping_update": ("h", "f", "local", "glob", "w_next"),
    "looping_update_two": ("h", "f", "local", "glob", "w_next"),
}
RESULTS = {
    "post_sandwich": ("h", "n"),
    "pre_norm": ("h", "n"),
    "branch_sandwich": ("h", "n"),
    "inject": ("h", "n"),
    "looping_update": ("h", "local", "n"),
    "looping_update_two": ("h", "local", "glob", "n"),
}
FACTORS: dict[str, dict[str, float]] = {
    "post_sandwich": {"alpha": 2.5},
    "pre_norm": {"scale": 0.7},
    "branch_sandwich": {"scale": 0.3},
    "inject": {"keep": 0.9, "add": 0.4},
    "looping_update": {"scale": 0.3, "decay": 0.6, "read_local": 1.3, "read_global": 0.7},
}
FACTORS["looping_update_two"] = FACTORS["looping_update"]


class Case(NamedTuple):
    """One op, which of its tensors it is given, and its options."""

    op: str
    without: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        words = [self.op, *(f"no_{name}" for name in self.without)]
        return "-".join([*words, *(f"{k}_{v}" for k, v in self.options.items())])

    @property
    def inputs(self) -> list[str]:
        return [name for name in ARGUMENTS[self.op] if name not in self.without]

    @property
    def factors(self) -> dict[str, float]:
        return FACTORS[self.op]

    @property
    def results(self) -> list[str]:
        return [name for name in RESULTS[self.op] if name != "n" or self.options.get("norm", True)]

    def call(self, module: Any, inputs: Sequence[Tensor], **changes: Any) -> list[Tensor]:
        """The results, n left out where it is None."""
        tensors = dict.fromkeys(ARGUMENTS[self.op]) | dict(zip(self.inputs, inputs, strict=True))
        options = self.factors | {"eps": EPS} | self.options | changes
        return [y for y in getattr(module, self.op)(**tensors, **options) if y is not None]

    def fused(self, inputs: Sequence[Tensor], **changes: Any) -> list[Tensor]:
        return self.call(kernels, inputs, **changes)

    def reference(self, inputs: Sequence[Tensor], **changes: Any) -> list[Tensor]:
        return self.call(reference, inputs, **changes)


NO_NORM = {"norm": False}
READOUT = {"source": "readout"}
MAIN = [
    Case("branch_sandwich"),
    Case("inject"),
    Case("looping_update"),
    Case("looping_update_two", options=READOUT),
]
CASES = [
    *MAIN,
    Case("branch_sandwich", ("w_branch",)),
    Case("branch_sandwich", ("w_branch", "w_next")),
    Case("branch_sandwich", ("w_next",), NO_NORM),
    Case("branch_sandwich", ("w_branch", "w_next"), NO_NORM),
    Case("post_sandwich", ("w_next",), NO_NORM),
    Case("post_sandwich", ("w_out", "w_next"), NO_NORM),
    Case("pre_norm", ("w_next",), NO_NORM),
    Case("inject", ("w_next",)),
    Case("inject", ("w_next",), NO_NORM),
    Case("looping_update", ("local",)),
    Case("looping_update", ("glob",)),
    Case("looping_update", ("local", "glob", "w_next")),
    Case("looping_update", ("w_next",), NO_NORM),
    Case("looping_update_two"),
    Case("looping_update_two", ("local",)),
    Case("looping_update_two", ("local", "glob", "w_next"), READOUT),
    Case("looping_update_two", ("w_next",), NO_NORM | READOUT),
]


def make_inputs(
    case: Case,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    gains: torch.dtype | None = None,
    memories: torch.dtype | None = None,
) -> list[Tensor]:
    found = []
    for name in case.inputs:
        if name.startswith("w_"):
            found.append(torch.rand(shape[-1]).add(0.5).to(gains or dtype))
        else:
            found.append(torch.randn(*shape).to(dtype))
            if name in ("local", "glob"):
                found[-1] = found[-1].to(memories or dtype)
    return found


def make_gradients(case: Case, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.randn(y.shape).to(y.dtype) for y in case.fused(inputs)]


def subsets(count: int) -> Iterator[tuple[bool, ...]]:
    """Every choice out of count things, but the empty one."""
    return (s for s in itertools.product((False, True), repeat=count) if any(s))


def some_used(count: int) -> list[tuple[bool, ...]]:
    """All results used, then each alone."""
    return [(True,) * count, *(tuple(i == j for j in range(count)) for i in range(count))]


def run(
    fn: Callable[..., list[Tensor]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool] | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The results, and the gradient of each input (None where none was asked for)."""
    needs = [True] * len(inputs) if needs is None else needs
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    results = fn(leaves)
    pairs = zip(results, gradients, strict=True)
    used = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
    torch.autograd.backward([y for y, _ in used], [g for _, g in used])
    return [y.detach() for y in results], [x.grad for x in leaves]


def compare(
    case: Case,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool] | None = None,
    eps: float = EPS,
    **tolerance: float,
) -> None:
    """The op against the reference in float64: values, every gradient, dtypes and shapes."""
    fused, reference = (partial(fn, eps=eps) for fn in (case.fused, case.reference))
    results, grads = run(fused, inputs, gradients, needs)
    exact, exact_grads = run(reference, double(inputs), double(gradients), needs)
    plain = case.reference(inputs)
    for name, y, e, p in zip(case.results, results, exact, plain, strict=True):
        assert y.dtype == p.dtype and y.shape == p.shape, f"{name}': {y.dtype} {list(y.shape)}"
        _close(f"{case} {name}'", y, e, tolerance)
    for name, x, g, e in zip(case.inputs, inputs, grads, exact_grads, strict=True):
        if e is None:
            # The reference knows what a result does not depend on; a zero says the same.
            assert g is None or not g.any(), f"d{name}: expected no gradient"
            continue
        assert g is not None, f"d{name} is missing"
        assert g.dtype == x.dtype and g.shape == x.shape, f"d{name}: {g.dtype} {list(g.shape)}"
        _close(f"{case} d{name}", g, e, tolerance)


def _close(name: str, actual: Tensor, expected: Tensor, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(
        actual.double(), expected, **tolerance, msg=lambda text: f"{name}: {text}"
    )
