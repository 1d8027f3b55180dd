"""Passes over memory by op: the floor, ours, and every other contender's.

    python -m bench.kernels.traffic [--op ...] [--only ours ...] [--d 4096] [--dtype bf16 fp32]

Needs no GPU. One pass is rows * d values of the op's dtype, read or written once.

* ours and Liger: their Triton kernels under Triton's interpreter; every lane of every executed
  load and store is counted, an address once for each launch and direction; the PyTorch operators
  around the kernels count, too. Liger's pre_norm goes below the floor of 5 because it returns one
  tensor as both gradients, which is safe only if nobody changes either in place.
* eager and naive: operator by operator, each reading its inputs once and writing its outputs
  once. eager's F.rms_norm counts as one kernel: forward one read and one write, backward two
  reads and one write, its gain's gradient included (in its favour: PyTorch computes that in a
  kernel that reads both again).
* compile: a model, not a count: all elementwise work and column sums fused into one pass for each
  norm, two norms in two kernels. The code that torch.compile emits depends on version and shape;
  the timed bench runs it.

A pass counts tensors of rows * d values or more. Beside them come statistics (O(rows)), gains
and partial sums of their gradients (O(d) each); the last two columns are ours. `asked` is ours in
passes with every repeated read of an address counted, gains included: L1 and L2 are meant to
serve those repeats.

Partial sums depend on the device: at most 8 rows of d float32 values here, a few for each SM on a
GPU, so 528 at most on 132 SMs: written once and read once, for each gain 0.13 passes of 16384
rows in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

from bench.harness.counting import Step, count
from bench.harness.markdown import markdown_table
from bench.kernels.ops import EPS, OPS, Contender, Op, contenders
from deeploop.kernels._launch import interpreting

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COLUMNS = ("floor", "ours", "liger", "eager", "naive", "compile")


# ---------------------------------------------------------------------------
# F.rms_norm as it runs on CUDA: one operator in each direction. On a CPU it is a chain.


@torch.library.custom_op("deeploop_bench::rms_norm", mutates_args=())
def _one_norm(x: Tensor, w: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = x.float()
    r = torch.rsqrt(y.square().mean(-1) + eps)
    return (y * r[:, None] * w.float()).to(x.dtype), r


@torch.library.custom_op("deeploop_bench::rms_norm_backward", mutates_args=())
def _one_norm_backward(dy: Tensor, x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y, g = x.float() * r[:, None], dy.float()
    gw = g * w.float()
    dx = r[:, None] * (gw - y * (gw * y).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * y).sum(0).to(w.dtype)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2], output[1])


def _gradients(ctx, dy, _):
    return *_one_norm_backward(dy, *ctx.saved_tensors), None


_one_norm.register_autograd(_gradients, setup_context=_save)


def one_norm(x: Tensor, w: Tensor) -> Tensor:
    return _one_norm(x, w, EPS)[0]


# ---------------------------------------------------------------------------
# Counting


def steps_of(
    op: Op, contender: Contender, n_rows: int, d: int, dtype: torch.dtype
) -> tuple[list[Step], list[Step]]:
    """Record the steps of the forward and of the backward with every gradient."""
    inputs = op.make_inputs(n_rows, d, dtype, "cpu", contender.gains or dtype)
    with count() as forward:
        outputs = contender.run(inputs)
    used = [y for y in outputs if y is not None and y.requires_grad]
    gradients = [torch.randn(y.shape).to(y.dtype) for y in used]
    with count() as backward:
        torch.autograd.grad(used, [x for x in inputs if x.requires_grad], gradients)
    return forward, backward


def summary(steps: list[Step], n_rows: int, d: int, itemsize: int) -> dict[str, Any]:
    """Count the passes, and the bytes beside them."""
    moved = [m for step in steps for m in step.moved]
    one_pass = n_rows * d * itemsize

    def size(kind: str) -> int:
        return sum(m.unique for m in moved if kind_of(m.shape, n_rows, d) == kind)

    return {
        "passes": size("rows") / one_pass,
        "asked": sum(m.requested for m in moved) / one_pass,
        "statistics_per_row": size("statistics") / n_rows,
        "gains": size("gains"),
        "kernels": [step.name for step in steps if step.kernel],
        "operators": [step.name for step in steps if not step.kernel],
    }


def kind_of(shape: tuple[int, ...], n_rows: int, d: int) -> str:
    """Classify a shape as rows, statistics (a few numbers per row) or gains.

    n_rows must divide no other dimension.
    """
    if not any(dim and dim % n_rows == 0 for dim in shape):
        return "gains"
    return "rows" if math.prod(shape) >= n_rows * d else "statistics"


def measure(
    op: Op, n_rows: int, d: int, name: str, only: list[str] | None = None
) -> list[dict[str, Any]]:
    """Count the passes of every available contender, or of some; a record per direction."""
    dtype = DTYPES[name]
    records: list[dict[str, Any]] = [
        {
            "op": op.name, "direction": direction, "dtype": name, "rows": n_rows, "d": d,
            "floor": op.floor[i], "compile": op.compiled and op.compiled[i], "counted": {},
        }
        for i, direction in enumerate(("forward", "backward"))
    ]  # fmt: skip
    for contender in contenders(op, one_norm)[0]:
        if contender.name == "apex" or (only and contender.name not in only):
            continue  # apex: CUDA only, and its kernels are not Triton's
        both = steps_of(op, contender, n_rows, d, dtype)
        for record, steps in zip(records, both, strict=True):
            record["counted"][contender.name] = summary(steps, n_rows, d, dtype.itemsize)
    return records


# ---------------------------------------------------------------------------
# Printing


def traffic_table(records: list[dict[str, Any]]) -> str:
    """Format a row for each op, direction and dtype."""
    head = ["op", "", "dtype", *COLUMNS, "asked", "bytes per row", "gains, KiB"]
    rows = []
    for r in records:
        row = [r["op"], r["direction"], r["dtype"]]
        for column in COLUMNS:
            value = r.get(column, r["counted"].get(column, {}).get("passes"))
            row.append("-" if value is None else f"{value:.4g}")
        ours = r["counted"].get("ours")
        beside = ("asked", "statistics_per_row", "gains") if ours else ()
        row += [f"{ours[key] / (1024 if key == 'gains' else 1):.4g}" for key in beside]
        rows.append(row)
    return markdown_table(head, rows, text_columns=3)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.kernels.traffic", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", type=int, default=61, help="a prime, to tell rows from gains")
    parser.add_argument("--d", type=int, nargs="+", default=[4096])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--op", nargs="+", choices=[op.name for op in OPS])
    parser.add_argument("--only", nargs="+", choices=("ours", "liger", "eager", "naive"))
    parser.add_argument("--json", action="store_true", help="records instead of tables")
    options = parser.parse_args(argv)
    if not interpreting():
        # Triton reads the variable when it is imported, so a new process has to set it.
        command = [sys.executable, "-m", "bench.kernels.traffic", *(argv or sys.argv[1:])]
        return subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}).returncode
    chosen = [op for op in OPS if not options.op or op.name in options.op]
    records: list[dict[str, Any]] = []
    for d in options.d:
        counted = [
            record
            for op in chosen
            for name in options.dtype
            for record in measure(op, options.rows, d, name, options.only)
        ]
        records += counted
        if not options.json:
            print(f"\nPasses over [rows, d]: {options.rows} rows, d = {d}, float32 gains\n")
            print(traffic_table(counted), flush=True)
    if options.json:
        print(json.dumps(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
