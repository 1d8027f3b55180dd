"""Every op, forward and backward, against everyone else who can compute it.

    pytest bench/bench_kernels.py [--benchmark-json=FILE]   then   python -m bench.report FILE

The same code on CPU and CUDA. On a CPU ours is the PyTorch closed form and shapes
are small; on CUDA it is the Triton kernels. First every contender is compared
with the float64 reference: ours must agree, another that does not is named and
left out, and only then is anything timed. Contenders take turns call by call.

What a record (benchmark.extra_info) holds is in `bench.record`; of these contenders

* seconds: median of one call. On CUDA: a graph replay between two events, L2
  flushed before, so launch overhead is not in it;
* call_seconds: median of one eager call, wall clock, device waited for (on a CPU
  the same as seconds). What it has over `seconds` is mostly launch overhead;
* gb_per_s and of_copy: the same work for everyone, so whoever moves more than the
  floor scores lower; FLOPs are those of the naive chain's arithmetic;
* peak_bytes: allocated at most by one forward and backward;
* bytes: what the call moves, counted operator by operator for eager, naive and, on
  a CPU, ours; on CUDA ours moves its floor (bench.traffic counts that); else None.

DEEPLOOP_BENCH_COMPILE=1 adds torch.compile on a CPU too, where each case takes many
seconds to build; on CUDA it runs until DEEPLOOP_BENCH_COMPILE_SECONDS (60) have gone
into building. DEEPLOOP_BENCH_SECONDS=N skips, in every suite, what has not begun after
N seconds, so that the results so far are still written; DEEPLOOP_BENCH_OPS="NAME ..."
leaves only these ops.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
import torch._functorch.config
from torch import Tensor

from bench.ops import OPS, Contender, Op, compiled, contenders
from bench.record import Work, counted
from bench.timing import (
    Budget,
    graphed,
    in_words,
    kernel_times,
    measured,
    not_compiling,
    peak_of,
    relative_error,
)
from deeploop.kernels import reference, registry
from deeploop.utils.device import pick_device

DEVICE = pick_device("auto")
CUDA = DEVICE.type == "cuda"
# [tokens, d] of a 124M model and of wider ones; past d = 2048 the backward works in chunks.
_ON_CUDA = [
    (torch.bfloat16, (65536, 768)),
    (torch.bfloat16, (16384, 4096)),
    (torch.bfloat16, (16384, 8192)),
    (torch.float32, (16384, 4096)),
    (torch.bfloat16, (32768, 2048)),
]
CASES = _ON_CUDA if CUDA else [(t, (1024, 768)) for t in (torch.bfloat16, torch.float32)]
CHOSEN = os.environ.get("DEEPLOOP_BENCH_OPS", "").split()
COMPILING = Budget(float(os.environ.get("DEEPLOOP_BENCH_COMPILE_SECONDS", "60")))
# |error| / |value| against float64: a few units of rounding, more for sums of many rows.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
# What an unfused path would launch: if any of it is there, the fused one did not run.
UNFUSED = ("rms_norm", "RowwiseMoments", "layer_norm", "vectorized_elementwise")
# What PyTorch's own operators run, so that a call's bytes can be counted as it runs.
ATEN_ONLY = ("ours", "eager", "naive")

OURS_FAILED = 9  # exit code; any other than 0 is a contender's fault

# A saved tensor is read again by every timed backward.
torch._functorch.config.donated_buffer = False


# ---------------------------------------------------------------------------
# One contender, ready to run


class Runner:
    """A contender on inputs of its own: forward, backward, and whether they are right."""

    def __init__(self, op: Op, contender: Contender, inputs: list[Tensor], stream: Any):
        self.contender, self.stream = contender, stream
        dtype = contender.gains or inputs[0].dtype
        # Only gains change dtype: a leaf of the right one, not a cast in each call.
        self.inputs = [
            (
                x.detach().to(dtype) if x.dim() == 1 and x.requires_grad else x.detach().clone()
            ).requires_grad_(x.requires_grad)
            for x in inputs
        ]
        self.leaves = [x for x in self.inputs if x.requires_grad]
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())  # the inputs were made there
        with self.on_stream():
            outputs = self.forward()
        self.used = [y for y in outputs if y is not None and y.requires_grad]

    def on_stream(self):
        return torch.cuda.stream(self.stream)  # does nothing where it is None

    def forward(self) -> tuple[Tensor, ...]:
        return self.contender.run(self.inputs)

    def set_gradients(self, gradients: list[Tensor]) -> None:
        self.gradients = gradients

    def backward(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.used, self.leaves, self.gradients, retain_graph=True)

    def both(self) -> None:
        outputs = [y for y in self.forward() if y is not None and y.requires_grad]
        torch.autograd.grad(outputs, self.leaves, self.gradients)

    def wrong(self, exact: list[Tensor], tolerance: float) -> str | None:
        """The first value or gradient that is off, in words."""
        with self.on_stream():
            found = [*self.used, *self.backward()]
        if CUDA:
            torch.cuda.synchronize()
        for i, (a, e) in enumerate(zip(found, exact, strict=True)):
            error = relative_error(a, e)
            if not error <= tolerance:
                kind = "output" if i < len(self.used) else "gradient"
                return f"{kind} {i} is off by {error:.1e} of its norm"
        return None


def exact_results(
    op: Op, inputs: list[Tensor], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Random output gradients; the differentiable outputs and all gradients in float64."""
    wide = [
        (x.detach().double() if x.is_floating_point() else x).requires_grad_(x.requires_grad)
        for x in inputs
    ]
    outputs = [y for y in op.run(getattr(reference, op.name), wide) if y is not None]
    outputs = [y for y in outputs if y.requires_grad]
    gradients = [torch.randn(y.shape, device=DEVICE).to(dtype) for y in outputs]
    leaves = [x for x in wide if x.requires_grad]
    exact = torch.autograd.grad(outputs, leaves, [g.double() for g in gradients])
    return gradients, [*(y.detach() for y in outputs), *exact]


# The two directions of a case come one after the other and share what is built.
@functools.lru_cache(maxsize=1)
def runners(
    op_name: str, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[dict[str, Runner], dict[str, str]]:
    """Every contender that computes the right thing, and why the others are missing."""
    op = next(op for op in OPS if op.name == op_name)
    stream = torch.cuda.Stream() if CUDA else None
    torch.manual_seed(0)
    inputs = op.make_inputs(*shape, dtype, DEVICE)
    gradients, exact = exact_results(op, inputs, dtype)
    found, missing = contenders(op)
    refused = not_compiling(DEVICE, COMPILING)
    if refused:
        missing["compile"] = refused
    else:
        torch._dynamo.reset()  # every shape is a new compilation; there is a limit on those
        found.append(compiled(op))
    right: dict[str, Runner] = {}
    for contender in found:
        building = COMPILING.spend() if contender.name == "compile" else contextlib.nullcontext()
        try:
            with building:
                runner = Runner(op, contender, inputs, stream)
                runner.set_gradients(gradients)
                problem = runner.wrong(exact, TOLERANCE[dtype])
        except Exception as error:
            problem = in_words(error)
        if problem is None:
            right[contender.name] = runner
        elif contender.name == "ours":
            stop(f"{op.name}: {problem}; nothing is timed")
        else:
            missing[contender.name] = problem
    return right, missing


def stop(reason: str) -> NoReturn:
    """End the session: ours is at fault, and no speed counts before it is right."""
    pytest.exit(reason, returncode=OURS_FAILED)


# ---------------------------------------------------------------------------
# Timing


def medians(
    calls: dict[str, Callable[[], object]], stream: Any, missing: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """What `measured` says of every contender, on CUDA by replays of graphs (see the top)."""
    replays = {}
    for name, run in calls.items() if CUDA else ():
        try:
            replays[name] = graphed(run, stream)
        except RuntimeError as error:
            missing[name] = f"timed without a CUDA graph: {in_words(error)}"
            replays[name] = run
    return measured(calls, DEVICE, rounds=30 if CUDA else 15, warmup=3, replays=replays)


def assert_fused(op: Op, runner: Runner, direction: str) -> None:
    """Ours launched its own kernel, and nothing of the chain it replaces."""
    run = runner.forward if direction == "forward" else runner.backward
    names = [name for name, _ in kernel_times(run)]
    ours = f"{registry.OPS[op.name].operator}_{direction}"
    if not any(ours in name for name in names):
        stop(f"no {ours} kernel in {names}")
    # Filling memory with zeros is no part of a chain.
    strays = [
        name
        for name in names
        if any(word in name for word in UNFUSED) and "FillFunctor" not in name
    ]
    if op.normed and strays:
        stop(f"{op.name}: unfused kernels beside the fused one: {strays}")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "op", [op for op in OPS if not CHOSEN or op.name in CHOSEN], ids=lambda op: op.name
)
@pytest.mark.parametrize(
    ("dtype", "shape"),
    CASES,
    ids=lambda x: f"{x[0]}x{x[1]}" if isinstance(x, tuple) else str(x).removeprefix("torch."),
)
def test_kernel(benchmark, op, shape, dtype, direction, machine):
    right, missing = runners(op.name, shape, dtype)
    missing = dict(missing)
    calls = {name: getattr(runner, direction) for name, runner in right.items()}
    passes = op.floor[direction == "backward"]
    floor = passes * shape[0] * shape[1] * dtype.itemsize
    entries = medians(calls, right["ours"].stream, missing)
    seen = [name for name in calls if name in ATEN_ONLY and not (CUDA and name == "ours")]
    moved = {name: counted(calls[name], opened=True) for name in seen}
    for name, entry in entries.items():
        entry["bytes"] = moved[name][0] if name in moved else None
        aten = CUDA or name in ATEN_ONLY  # only of those a CPU counts what they hold
        entry["peak_bytes"] = peak_of(right[name].both, right[name].inputs) if aten else None
    if CUDA:
        entries["ours"]["bytes"] = floor
    work = Work(floor, moved["naive"][1] if "naive" in moved else None)
    case = {"op": op.name, "direction": direction, "rows": shape[0], "d": shape[1]}
    others = [name for name in entries if name != "ours"]
    benchmark.extra_info |= machine.record("kernels", case, dtype, work, entries, others, missing)
    benchmark.extra_info["floor_passes"] = passes
    benchmark.pedantic(calls["ours"], rounds=3)
    if CUDA:
        assert_fused(op, right["ours"], direction)
