"""The ops on rows as one table, their inputs, and their comparison with the reference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deeploop import kernels
from deeploop.kernels import reference

EPS = 1e-3


class Op(NamedTuple):
    """The tensors an op takes, those it returns, and its factors."""

    inputs: tuple[str, ...]  # w_*: gains [d]; the others [..., d]
    results: tuple[str, ...]
    factors: dict[str, float]


_STREAM = ("h", "n")
_MEMORIES = ("h", "f", "local", "glob", "w_next")
_READS = {"scale": 0.3, "decay": 0.6, "read_local": 1.3, "read_global": 0.7}
OPS = {
    "post_sandwich": Op(("h", "f", "w_out", "w_next"), _STREAM, {"alpha": 2.5}),
    "pre_norm": Op(("h", "f", "w_next"), _STREAM, {"scale": 0.7}),
    "branch_sandwich": Op(("h", "f", "w_branch", "w_next"), _STREAM, {"scale": 0.3}),
    "inject": Op(("h", "x", "w_next"), _STREAM, {"keep": 0.9, "add": 0.4}),
    "looping_update": Op(_MEMORIES, ("h", "local", "n"), _READS),
    "looping_update_two": Op(_MEMORIES, ("h", "local", "glob", "n"), _READS),
}


class Case(NamedTuple):
    """An op, the optional tensors it is called without, and its options."""

    op: str
    without: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        words = [self.op, *(f"no_{name}" for name in self.without)]
        return "-".join([*words, *(f"{k}_{v}" for k, v in self.options.items())])

    @property
    def inputs(self) -> list[str]:
        return [name for name in OPS[self.op].inputs if name not in self.without]

    @property
    def factors(self) -> dict[str, float]:
        return OPS[self.op].factors

    @property
    def results(self) -> list[str]:
        norm = self.options.get("norm", True)
        return [name for name in OPS[self.op].results if name != "n" or norm]

    def call(self, module: Any, inputs: Sequence[Tensor], **changes: Any) -> list[Tensor]:
        """Call the op of that name in a module; n is left out where it is None."""
        tensors = dict.fromkeys(OPS[self.op].inputs) | dict(zip(self.inputs, inputs, strict=True))
        options = self.factors | {"eps": EPS} | self.options | changes
        return [y for y in getattr(module, self.op)(**tensors, **options) if y is not None]

    def fused(self, inputs: Sequence[Tensor], **changes: Any) -> list[Tensor]:
        return self.call(kernels, inputs, **changes)

    def reference(self, inputs: Sequence[Tensor], **changes: Any) -> list[Tensor]:
        return self.call(reference, inputs, **changes)


NO_NORM = {"norm": False}
READOUT = {"source": "readout"}
# Each op once, with every tensor it can take.
FULL = [
    Case("post_sandwich"),
    Case("pre_norm"),
    Case("branch_sandwich"),
    Case("inject"),
    Case("looping_update"),
    Case("looping_update_two", options=READOUT),
]
CASES = [
    *FULL,
    Case("post_sandwich", ("w_out",)),
    Case("post_sandwich", ("w_next",)),
    Case("post_sandwich", ("w_out", "w_next")),
    Case("post_sandwich", ("w_next",), NO_NORM),
    Case("post_sandwich", ("w_out", "w_next"), NO_NORM),
    Case("pre_norm", ("w_next",)),
    Case("pre_norm", ("w_next",), NO_NORM),
    Case("branch_sandwich", ("w_branch",)),
    Case("branch_sandwich", ("w_branch", "w_next")),
    Case("branch_sandwich", ("w_next",), NO_NORM),
    Case("branch_sandwich", ("w_branch", "w_next"), NO_NORM),
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

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sliced": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "padded": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
    "scalar": lambda x: x.flatten()[:1].expand(x.shape),
}


def make_inputs(
    case: Case,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    gains: torch.dtype | None = None,
    memories: torch.dtype | None = None,
) -> list[Tensor]:
    """Draw a case's inputs; gains and memories have `dtype` unless they are given another."""
    drawn = []
    for name in case.inputs:
        if name.startswith("w_"):
            drawn.append(torch.rand(shape[-1]).add(0.5).to(gains or dtype))
        else:
            own = memories if name in ("local", "glob") else None
            drawn.append(torch.randn(*shape).to(dtype).to(own or dtype))
    return drawn


def make_gradients(case: Case, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Draw a gradient for each result of a case."""
    return [torch.randn(y.shape).to(y.dtype) for y in case.fused(inputs)]


def subsets(count: int) -> Iterator[tuple[bool, ...]]:
    """Yield every choice out of count things but the empty one."""
    return (s for s in itertools.product((False, True), repeat=count) if any(s))


def some_used(count: int) -> list[tuple[bool, ...]]:
    """Return the choice of all results, then of each alone."""
    return [(True,) * count, *(tuple(i == j for j in range(count)) for i in range(count))]


def every_subset(case: Case) -> Iterator[tuple[tuple[bool, ...], tuple[bool, ...]]]:
    """Yield pairs: which results are used (all, or one) and which inputs need a gradient."""
    return itertools.product(some_used(len(case.results)), subsets(len(case.inputs)))


def some_subsets(case: Case) -> Iterator[tuple[tuple[bool, ...], tuple[bool, ...]]]:
    """Yield from `every_subset` each input alone, and each result alone with all inputs."""
    for used, needs in every_subset(case):
        if all(needs) or (all(used) and sum(needs) == 1):
            yield used, needs


def chosen(items: Sequence[Tensor], used: Sequence[bool]) -> list[Tensor | None]:
    """Return the items, None in place of those that are not used."""
    return [x if u else None for x, u in zip(items, used, strict=True)]


def double(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return the tensors in float64."""
    return [None if x is None else x.double() for x in tensors]


def run(
    fn: Callable[..., list[Tensor]],
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool] | None = None,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Run an op and its backward.

    Args:
        fn: Takes the list of inputs.
        inputs: As `make_inputs` draws them.
        gradients: One for each result; None where a result is not used.
        needs: Which inputs need a gradient; None for all.

    Returns:
        The results, and the gradient of each input (None where none was asked for).
    """
    needs = [True] * len(inputs) if needs is None else needs
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs, strict=True)]
    results = fn(leaves)
    pairs = zip(results, gradients, strict=True)
    used = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
    torch.autograd.backward([y for y, _ in used], [g for _, g in used])
    return [y.detach() for y in results], [x.grad for x in leaves]


def same_bits(first: Any, second: Any) -> bool:
    """Compare two returns of `run` bit by bit."""
    pairs = zip(itertools.chain(*first), itertools.chain(*second), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def compare(
    case: Case,
    inputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool] | None = None,
    eps: float = EPS,
    **tolerance: float,
) -> None:
    """Compare an op with the reference in float64: values, gradients, dtypes and shapes."""
    fused, reference = (partial(fn, eps=eps) for fn in (case.fused, case.reference))
    results, grads = run(fused, inputs, gradients, needs)
    exact, exact_grads = run(reference, double(inputs), double(gradients), needs)
    plain = case.reference(inputs)
    for name, y, e, p in zip(case.results, results, exact, plain, strict=True):
        assert y.dtype == p.dtype and y.shape == p.shape, f"{name}': {y.dtype} {list(y.shape)}"
        _close(f"{case} {name}'", y, e, tolerance)
    for name, x, g, e in zip(case.inputs, inputs, grads, exact_grads, strict=True):
        if e is None:
            # The reference knows that a result does not depend on an input; a zero says the same.
            assert g is None or not g.any(), f"d{name}: expected no gradient"
            continue
        assert g is not None, f"d{name} is missing"
        assert g.dtype == x.dtype and g.shape == x.shape, f"d{name}: {g.dtype} {list(g.shape)}"
        _close(f"{case} d{name}", g, e, tolerance)


def compare_overflow(case: Case, n_rows: int, d: int, size: float) -> None:
    """Compare an op on values near `size`, whose mean square overflows, with eager float32.

    Where eager PyTorch gives a finite number the op must give the same one.
    """
    inputs = make_inputs(case, (n_rows, d), torch.float32)
    gradients = make_gradients(case, inputs)
    for name, x in zip(case.inputs, inputs, strict=True):
        if not name.startswith("w_"):
            x.copy_(size * (1 + x.clamp(-0.5, 0.5)))
    actual, eager = (run(fn, inputs, gradients) for fn in (case.fused, case.reference))
    names = [*(f"{name}'" for name in case.results), *(f"d{name}" for name in case.inputs)]
    for name, a, e in zip(names, (*actual[0], *actual[1]), (*eager[0], *eager[1]), strict=True):
        finite = e.isfinite()
        assert finite.all() or size > 1e20, f"{name}: the test compares nothing"
        _close(
            f"{case} {name} at {size}", a[finite], e[finite].double(), {"rtol": 1e-5, "atol": 1e-5}
        )


def _close(name: str, actual: Tensor, expected: Tensor, tolerance: dict[str, float]) -> None:
    torch.testing.assert_close(
        actual.double(), expected, **tolerance, msg=lambda text: f"{name}: {text}"
    )
