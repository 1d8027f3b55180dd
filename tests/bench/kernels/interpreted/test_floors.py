"""Each op moves its floor and no more, counted from the operations that its kernels execute."""

import pytest

from bench.kernels.ops import OPS
from bench.kernels.traffic import measure
from tests.helpers.launches import patch_language_once

ROWS = 11  # a prime, and more than the programs of a launch
ALLOWED = 1.03
# 1024 is a row in registers, 3072 one in chunks.
SHAPES = [("bf16", 1024), ("fp32", 3072)]
every_case = pytest.mark.parametrize(
    ("op", "direction", "dtype", "d"),
    [(op, way, *shape) for op in OPS for way in ("forward", "backward") for shape in SHAPES],
    ids=lambda x: getattr(x, "name", x),
)


@pytest.fixture(scope="module")
def records():
    """By op, direction, dtype and d."""
    with pytest.MonkeyPatch.context() as patch:
        patch_language_once(patch)
        counted = [measure(op, ROWS, d, dtype, ["ours"]) for op in OPS for dtype, d in SHAPES]
    return {(r["op"], r["direction"], r["dtype"], r["d"]): r for both in counted for r in both}


@every_case
def test_at_the_floor(records, op, direction, dtype, d):
    record = records[op.name, direction, dtype, d]
    ours = record["counted"]["ours"]
    # Less than the floor would be a wrong floor, or a wrong counter.
    assert record["floor"] * 0.99 <= ours["passes"] <= record["floor"] * ALLOWED, ours
    assert ours["asked"] >= ours["passes"]
    assert ours["kernels"], "no Triton kernel ran"


@every_case
def test_little_comes_beside_it(records, op, direction, dtype, d):
    """A few numbers per row, and per program and column of a gain; no stray copies."""
    ours = records[op.name, direction, dtype, d]["counted"]["ours"]
    if not op.normed:
        return  # the router's experts stand beside its rows, and its logits are per row
    per_row = 8 if "slots" not in op.inputs else 72  # slots, weights, marks of 4 experts
    assert ours["statistics_per_row"] <= per_row
    gains = sum(name.startswith("w_") for name in op.inputs)
    # 8 programs write a partial sum, one operator reads them all and writes the sum.
    assert ours["gains"] <= gains * d * 4 * (1 + 8 + 8 + 1)
    allowed = {"aten.sum.dim_IntList"}
    if "slots" in op.inputs:
        allowed.add("aten.zeros_like.default")  # the marks of its rows, one byte each
    assert set(ours["operators"]) <= allowed
