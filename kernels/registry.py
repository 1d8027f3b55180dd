"""The table of ops: names, arguments, floors, launches, scratch memory and step component.

The compile gate, the byte counter, the benches, the memory planner, the roofline model and
the trace reader all read this table. An op here is a function of `deeploop.kernels`; an
operator is a torch operator, torch.ops.deeploop.<name>, that ops run on.

    python -m deeploop.kernels.registry

prints the names of the ops, the most used first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

PACKAGE = "deeploop.kernels"
NAMESPACE = "deeploop::"

Scratch = Callable[[Any], int]  # bytes that an operator allocates and frees, by its arguments


class Op(NamedTuple):
    """One op of `deeploop.kernels`."""

    name: str
    module: str  # its file, and its Triton file's launches
    operator: str  # the operator it runs on, torch.ops.deeploop.<operator>
    arguments: tuple[str, ...]  # its tensors, in order
    results: tuple[str, ...]
    passes: tuple[int, int]  # fewest passes over [rows, d], forward and backward
    passes_per_expert: tuple[int, int] = (0, 0)  # and for each expert of a token
    compiled: bool = True  # False where another op's launches are the same
    title: str = ""  # its name in aot_launches, if not `name`
    tuned: str = ""  # column of the launch table that its backward uses; empty: not tuned

    def floor(self, top_k: int = 0) -> tuple[int, int]:
        """Fewest passes over one [rows, d] tensor, forward and backward.

        Every activation is read once and every result written once; statistics, O(rows),
        and gains, O(d), are not counted.
        """
        forward, backward = self.passes
        per_forward, per_backward = self.passes_per_expert
        return forward + top_k * per_forward, backward + top_k * per_backward

    def launches(self, x: Any, w: Any, *config: Any) -> dict[str, Any]:
        """Build every launch of the op's module by name, on rows like x and gains like w."""
        return importlib.import_module(f"{PACKAGE}.{self.module}").aot_launches(x, w, *config)


_LOOPING = ("h", "f", "local", "glob", "w_next")
# The most used first: a bench with little time takes them in this order.
OPS = {
    op.name: op
    for op in (
        Op(
            "post_sandwich", "post_sandwich", "post_sandwich",
            ("h", "f", "w_out", "w_next"), ("h", "n"), (4, 6), tuned="two gains",
        ),
        Op(
            "pre_norm", "pre_norm", "linear_update",
            ("h", "f", "w_next"), ("h", "n"), (4, 5), tuned="one gain",
        ),
        Op(
            "branch_sandwich", "branch_sandwich", "branch_sandwich",
            ("h", "f", "w_branch", "w_next"), ("h", "n"), (4, 6), tuned="two gains",
        ),
        Op(
            "looping_update", "looping_update", "linear_update",
            _LOOPING, ("h", "local", "n"), (7, 8), tuned="two gains",
        ),
        Op(
            "expert_combine", "expert_combine", "expert_combine",
            ("h", "routed", "slots", "weights", "shared", "w_branch", "w_next"), ("h", "n"),
            (4, 6), passes_per_expert=(1, 2), title="combine", tuned="combine",
        ),
        Op(
            "sigmoid_router", "sigmoid_router", "sigmoid_router",
            ("x", "w", "bias"), ("weights", "indices", "load", "z"), (1, 2), title="router",
        ),
        Op(
            "looping_update_two", "looping_update", "linear_update",
            _LOOPING, ("h", "local", "glob", "n"), (8, 9), compiled=False,
        ),
        Op(
            "inject", "inject", "linear_update",
            ("h", "x", "w_next"), ("h", "n"), (4, 5), compiled=False, tuned="one gain",
        ),
    )
}  # fmt: skip


# ---------------------------------------------------------------------------
# Operators


def _copies(low: float, full: float) -> Scratch:
    """Float32 copies of an operator's first tensor: `low` with bfloat16 tensors, else `full`."""

    def scratch(args: Any) -> int:
        import torch

        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        bf16 = any(x.dtype == torch.bfloat16 for x in tensors)
        return int(4 * tensors[0].numel() * (low if bf16 else full))

    return scratch


def _linear_backward(args: Any) -> int:
    """More copies where a memory has a gradient or needs one."""
    memories = any(x is not None for x in (*args[1:3], *args[11:13]))
    return (_copies(5, 3) if memories else _copies(1, 0))(args)


def _inner(count: int, down: int) -> Scratch:
    """`count` tensors [rows, d_expert] in the dtype of x, for `deeploop.model.moe.experts`.

    `down` is the position of the matrices [E, d, f] among the arguments; the rows' tokens
    follow them, and x is first but for the gradient.
    """

    def scratch(args: Any) -> int:
        return int(count * args[down + 1].numel() * args[down].shape[2] * args[0].element_size())

    return scratch


class Operator(NamedTuple):
    """One torch operator with its backward: component of a step, and scratch memory of both.

    On a CPU the updates are closed forms in PyTorch; their copies are as its profiler
    counts them.
    """

    component: Literal["updates", "router", "experts"]  # where a profiler books its time
    cpu: tuple[Scratch | None, Scratch | None]
    cuda: tuple[Scratch | None, Scratch | None] = (None, None)


OPERATORS = {
    "post_sandwich": Operator("updates", (_copies(2, 1), _copies(5, 3))),
    "linear_update": Operator("updates", (_copies(1, 0), _linear_backward)),
    "branch_sandwich": Operator("updates", (_copies(2, 1), _copies(5, 3))),
    "expert_combine": Operator("updates", (_copies(3, 2), _copies(6, 2))),
    "sigmoid_router": Operator("router", (_copies(1, 0.5), None)),
    # Defined in the model layer, deeploop.model.moe.experts.
    "experts": Operator(
        "experts", (None, _copies(2, 2)), cuda=(_inner(1, down=2), _inner(4, down=3))
    ),
}


def component(operator: str) -> str:
    """Component of a step that an operator belongs to, by its full name; "" if it is not ours.

    >>> component("deeploop::sigmoid_router_backward")
    'router'
    """
    if not operator.startswith(NAMESPACE):
        return ""
    name = operator.removeprefix(NAMESPACE).removesuffix("_backward")
    return OPERATORS[name].component if name in OPERATORS else ""


def scratch(device: Literal["cpu", "cuda"]) -> dict[Any, Scratch]:
    """Scratch memory on a device by torch operator, where it is known."""
    import torch

    ops = torch.ops.deeploop
    return {
        getattr(ops, name + direction).default: size
        for name, operator in OPERATORS.items()
        for direction, size in zip(("", "_backward"), getattr(operator, device), strict=True)
        if size is not None
    }


if __name__ == "__main__":
    print(*OPS)
