"""Custom ops from one declaration each: the op, its backward, their fakes and the autograd formula.

    _forward, _backward = define("name", ...)

registers torch.ops.deeploop.name and torch.ops.deeploop.name_backward. The functions of
a declaration return None for a result or a gradient that is not asked for. A custom op
must return tensors, so the op returns an empty one of shape [0] in its place; the
backward op returns the list of the gradients asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.library import CustomOpDef

from ._aten import count, no_autocast
from ._launch import Launch

# n, the second result of an update: a Tensor, or None if it was called with norm=False.
Normed: TypeAlias = Any


class Saved(NamedTuple):
    """Tensors and plain values that a forward keeps for its backward."""

    tensors: Sequence[Tensor | None]
    options: tuple[Any, ...] = ()


def _append(options: tuple[Any, ...], needs: list[bool]) -> tuple[Any, ...]:
    return (*options, needs)


def define(
    name: str,
    *,
    arguments: str,
    results: Sequence[str],
    gradients_from: Sequence[str],
    gradients_for: Sequence[str],
    forward: Callable[..., Sequence[Tensor | None]],
    fake: Callable[..., Sequence[Tensor | None]],
    save: Callable[[Any, Any], Saved],
    backward_arguments: str,
    backward: Callable[..., Sequence[Tensor | None]],
    backward_fake: Callable[..., Sequence[Tensor | None]],
    ask: Callable[[tuple[Any, ...], list[bool]], tuple[Any, ...]] = _append,
) -> tuple[CustomOpDef, CustomOpDef]:
    """Register a custom op with its backward op and return both.

    Args:
        name: the op is torch.ops.deeploop.<name>, its backward <name>_backward.
        arguments: the op's arguments as a torch schema, "Tensor x, Tensor? w, bool norm".
        results: names of the op's results.
        gradients_from: results whose gradients the backward takes, as its first arguments.
        gradients_for: arguments that can get a gradient, in the order of the backward's results.
        forward: takes the arguments; returns the results, None for one not asked for.
        fake: the same on fake tensors: shapes and dtypes alone.
        save: takes the arguments and the op's results; returns what the backward needs.
        backward_arguments: as `arguments`: gradients, saved tensors, options, needs.
        backward: returns one gradient for each of `gradients_for`, None where not needed.
        backward_fake: the same on fake tensors.
        ask: makes the backward's last arguments from the saved options and, for each of
            `gradients_for`, whether it is needed.
    """
    op = _register(
        name, f"({arguments}) -> ({', '.join(['Tensor'] * len(results))})",
        _with_empties(forward), _with_empties(fake),
    )  # fmt: skip
    backward_op = _register(
        f"{name}_backward", f"({backward_arguments}) -> Tensor[]",
        _without_nones(backward), _without_nones(backward_fake),
    )  # fmt: skip
    names = [argument.name for argument in op._opoverload._schema.arguments]
    sources = [results.index(result) for result in gradients_from]
    targets = [names.index(argument) for argument in gradients_for]
    _register_autograd(op, backward_op, sources, targets, save, ask)
    return op, backward_op


def _register_autograd(
    op: CustomOpDef,
    backward_op: CustomOpDef,
    sources: list[int],
    targets: list[int],
    save: Callable[[Any, Any], Saved],
    ask: Callable[[tuple[Any, ...], list[bool]], tuple[Any, ...]],
) -> None:
    """Make backward_op the gradient of op: from results at `sources` to arguments at `targets`."""
    n_arguments = len(op._opoverload._schema.arguments)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        saved = save(inputs, output)
        ctx.save_for_backward(*saved.tensors)
        ctx.options = saved.options
        ctx.mark_non_differentiable(
            *[x for i, x in enumerate(output) if i not in sources or _is_empty(x)]
        )
        ctx.set_materialize_grads(False)

    def gradients(ctx: Any, *incoming: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [incoming[i] for i in sources]
        outgoing: list[Tensor | None] = [None] * n_arguments
        if any(g is not None for g in given):
            needs = [ctx.needs_input_grad[i] for i in targets]
            needed = [i for i, need in zip(targets, needs, strict=True) if need]
            computed = backward_op(*given, *ctx.saved_tensors, *ask(ctx.options, needs))
            for i, gradient in zip(needed, computed, strict=True):
                outgoing[i] = gradient
        return tuple(outgoing)

    op.register_autograd(gradients, setup_context=setup_context)


def _register(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> CustomOpDef:
    op = torch.library.custom_op(f"deeploop::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(fake)
    return op


def _with_empties(fn: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
    def filled(first: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return tuple([first.new_empty(0) if x is None else x for x in fn(first, *rest)])

    return filled


def _without_nones(fn: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Any]:
    def listed(*args: Any) -> list[Tensor]:
        return [x for x in fn(*args) if x is not None]

    return listed


def _is_empty(x: Tensor) -> bool:
    """True for the empty tensor that stands in for a result that was not asked for."""
    return x.dim() == 1 and x.shape[0] == 0


# ---------------------------------------------------------------------------
# For the functions of a declaration


def as_data(*values: float) -> Tensor:
    """Pack Python numbers into one float64 tensor on the CPU, for a custom op to read back.

    torch.compile guards on a float argument of an op, so each new value compiles
    anew; a tensor is data. A product is the form in which it traces a float as one.
    """
    if not torch.compiler.is_compiling():
        return torch.tensor(values, dtype=torch.float64, device="cpu")
    one = torch.ones((), dtype=torch.float64, device="cpu")
    return torch.stack([one * value for value in values])


def run(
    fused: bool, like: Tensor, build: Callable[..., Any], closed: Callable[..., Any], *args: Any
) -> Any:
    """Compute an op's results on the device of `like`.

    fused: fill the tensors that `build(*args)` allocates by its launches; otherwise
    return `closed(*args)`, the closed form in PyTorch.
    """
    if not fused:
        with no_autocast(like):
            return closed(*args)
    outputs, launches = build(*args)
    for launch in [launches] if isinstance(launches, Launch) else launches:
        launch.run(like)
    return outputs


def fake_update(
    h: Tensor, like_n: Tensor, dtype: torch.dtype, norm: bool
) -> tuple[Tensor | None, ...]:
    """Fake h', n, r1, r2 of an update: n in the dtype of like_n, statistics [rows] in dtype."""
    r1 = h.new_empty((count(h),), dtype=dtype)
    normed = (like_n.new_empty(h.shape), torch.empty_like(r1)) if norm else (None, None)
    return h.new_empty(h.shape), normed[0], r1, normed[1]


def fake_gradients(needs: list[bool], *like: Tensor) -> list[Tensor | None]:
    """Fake gradients in the shapes and dtypes of `like`, None where not needed."""
    return [x.new_empty(x.shape) if need else None for x, need in zip(like, needs, strict=True)]
