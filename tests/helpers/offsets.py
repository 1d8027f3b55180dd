"""Check in Triton's IR that no 32-bit address offset of a kernel can overflow.

An interval of possible values is computed for every 32-bit integer of a kernel: from the
constants, the launch's integer arguments, the grid and the bounds of loops. A result outside
of 32 bits has wrapped, and an address made from it is a fault, also where it was widened
afterwards. Whatever a kernel reads from memory may have any value of its type.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch

from tests.helpers.kernel_modules import Launch, aot

LOWEST, HIGHEST = -(2**31), 2**31 - 1
# Rows of a launch that is checked: nearly as many as 32 bits count, or an eighth for the op
# that counts its rows' slots, too.
ROWS = (2**31 - 2**16, 2**28)


class Interval(NamedTuple):
    """Possible values of an integer, and the source of an overflow on the way to it."""

    low: int = LOWEST
    high: int = HIGHEST
    wrapped: str = ""


def largest_launches(op: str, d: int) -> dict[str, Launch]:
    """Build the launches of an op, by title, on the most rows of width d whose counts fit."""
    gain = torch.empty(d, device="meta")
    for rows in ROWS:
        x = torch.empty(rows, d, dtype=torch.bfloat16, device="meta")
        launches = aot.OPS[op].launches(x, gain)
        counts = [v for launch in launches.values() for v in integers(launch).values()]
        if max(counts) <= HIGHEST:
            return launches
    raise AssertionError(f"{op}: its launches count more than {HIGHEST} of something")


def integers(launch: Launch) -> dict[str, int]:
    """Return a launch's integer arguments, without its constants, by name."""
    names = [p.name for p in launch.kernel.params if not p.is_constexpr]
    return {n: launch.args[n] for n in names if type(launch.args[n]) is int}


def ttir(launch: Launch, arch: int = 90) -> str:
    """Compile a launch as far as Triton's own IR, which needs neither ptxas nor a GPU."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", arch, 32)
    backend, source, context = make_backend(target), aot.ast_source(launch), ir.context()
    options: Any = backend.parse_options(launch.options | source.parse_options())
    ir.load_dialects(context)
    backend.load_dialects(context)
    made = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *made, context)
    return backend.make_ttir(module, {}, options, arch).str_nodebug()


def overflows(launch: Launch) -> list[str]:
    """Return the lines of a launch's IR that make an address from an overflowed offset."""
    known, faults = {}, []
    text = ttir(launch)
    counts = iter(integers(launch).values())
    for name, kind in re.findall(r"(%arg\d+): ([\w!.<>]+)", text.split("attributes")[0]):
        if kind == "i32":
            known[name] = Interval(0, next(counts))
    assert next(counts, None) is None, "an integer argument has another type than i32"
    for line in text.splitlines():
        loop = re.search(r"scf\.for (%\w+) = (%\w+) to (%\w+)", line)
        made = re.match(r"\s*(%[\w-]+) = ([\w.]+)\s?(.*)", line)
        if loop:
            first, end = (known.get(name, Interval()) for name in loop.groups()[1:])
            known[loop[1]] = Interval(first.low, end.high - 1, first.wrapped or end.wrapped)
        elif made:
            result, name, rest = made.groups()
            operands = [known.get(x, Interval()) for x in re.findall(r"%[\w-]+", rest)]
            if name == "tt.addptr" and operands[1].wrapped:
                faults.append(f"{line.strip()}  (from {operands[1].wrapped})")
            known[result] = interval(name, rest, operands, launch.grid, line.strip())
    return faults


def interval(name: str, rest: str, operands: list[Interval], grid: int, line: str) -> Interval:
    """Return the interval of one instruction's result."""
    if name == "tt.get_program_id":
        return Interval(0, grid - 1)
    if name == "tt.get_num_programs":
        return Interval(grid, grid)
    if name == "tt.make_range":
        end, start = (int(re.search(rf"{x} = (\d+)", rest)[1]) for x in ("end", "start"))
        return Interval(start, end - 1)
    if name == "arith.constant":
        value = re.match(r"(?:dense<)?(-?\d+)>? :", rest)
        return Interval(int(value[1]), int(value[1])) if value else Interval()
    wrapped = next((x.wrapped for x in operands if x.wrapped), "")
    ends = ENDS.get(name)
    if ends is None:
        return Interval(wrapped=wrapped)
    values = ends(*[(x.low, x.high) for x in operands])
    low, high = min(values), max(values)
    narrow = re.search(r"\bi32\W*$|xi32>$", rest) is not None
    if narrow and (low < LOWEST or high > HIGHEST):
        return Interval(wrapped=wrapped or line)
    return Interval(low, high, wrapped)


def products(a, b):
    return [x * y for x in a for y in b]


def quotients(a, b):
    return [int(x / y) for x in a for y in b if y]


def same(a, *shape):
    return a


# Smallest and largest values of results, from those of the operands.
ENDS = {
    "arith.addi": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "arith.subi": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "arith.muli": products,
    "arith.divsi": quotients,
    "arith.remsi": lambda a, b: (min(0, a[0]), max(0, b[1] - 1)),
    "arith.minsi": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "arith.maxsi": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "arith.select": lambda m, a, b: (*a, *b),
} | dict.fromkeys(
    ("arith.extsi", "tt.splat", "tt.broadcast", "tt.expand_dims", "tt.reshape", "tt.trans"), same
)
