"""Compile every kernel for a GPU, which need not be present, and check the machine code.

    python -m deeploop.kernels.aot [--arch 90] [--d 768 4096] [--dtype bf16] [--op pre_norm]

Prints, for each launch of each op, registers, spills, atomics and the share of global
bytes moved in 128-bit accesses, from the cubin (ptxas and cuobjdump come with Triton).
Exit code 1 if a kernel spills, uses an atomic, needs more shared memory than a program
may have, or moves less than 90% of its bytes in 128-bit accesses at a d divisible by 8.
Runs one process per CPU.
"""

from __future__ import annotations

import argparse
import collections
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deeploop.utils.processes import worker_pool

from . import _launch, registry

OPS = {name: op for name, op in registry.OPS.items() if op.compiled}
# One for each key of the launch tables, and widths between two keys, which spill first.
WIDTHS = (768, 2048, 4096, 6144, 12288, 16384)
# The router reads its rows in tiles: their width changes little.
FEW = {"sigmoid_router": (768, 4096)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ROWS = 4096
# Bitwise ones give the same result in any order; sm_100 allots tensor memory with them.
ATOMICS = ("ATOM", "ATOMG", "ATOMS", "RED", "REDG", "REDAS")
# Bytes of shared memory a program may have.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
VECTOR_SHARE = 0.9
# Slots, weights and indices are numbers per token, not rows, and not read in 128 bits.
VECTOR_SHARES = {"sigmoid_router": 0.35, "expert_combine": 0.75}


class Report(NamedTuple):
    """Counts from the machine code of one launch."""

    registers: int
    stack: int  # bytes
    spills: int  # local loads and stores
    atomics: int
    vector_share: float  # of global bytes, by instruction
    loads: int
    stores: int
    instructions: int
    shared: int = 0  # bytes of shared memory

    def failures(self, d: int, arch: int, share: float = VECTOR_SHARE) -> list[str]:
        """Reasons why the gate refuses the launch; empty if it passes."""
        reasons = []
        if self.spills or self.stack:
            reasons.append(f"{self.spills} spills, {self.stack} bytes of stack")
        if self.atomics:
            reasons.append(f"{self.atomics} atomics")
        if self.shared > SHARED.get(arch, min(SHARED.values())):
            reasons.append(f"{self.shared} bytes of shared memory")
        if d % 8 == 0 and self.vector_share < share:
            reasons.append(f"only {self.vector_share:.0%} of global bytes in 128-bit accesses")
        return reasons


def least_share(op: str) -> float:
    """Least share of bytes in 128-bit accesses that the gate accepts for one op."""
    return VECTOR_SHARES.get(op, VECTOR_SHARE)


def ast_source(launch: _launch.Launch) -> Any:
    """Return a launch's kernel with its types and constants, as Triton's compiler takes it."""
    from triton.compiler import ASTSource

    names = {dtype: f"*{name}" for name, dtype in DTYPES.items()}
    names |= {torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8"}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.args[name]
        if parameter.is_constexpr or value is None:
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = names[value.dtype]
            # PyTorch allocates on 16-byte borders and Triton looks at launch.
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: _launch.Launch, arch: int) -> Any:
    """Compile a launch for compute capability arch (90 is an H100 or H200)."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", arch, 32)
    return triton.compile(ast_source(launch), target=target, options=launch.options)


def read(kernel: Any) -> Report:
    """Count registers, spills, atomics and accesses in a compiled kernel's machine code."""
    return _read_cubin(kernel.asm["cubin"])._replace(shared=kernel.metadata.shared)


@functools.cache
def _read_cubin(cubin: bytes) -> Report:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def dump(flag: str) -> str:
        command = [str(tool), flag, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = dump("-res-usage"), dump("-sass")
    opcode = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)"
    opcodes = [tuple(name.split(".")) for name in re.findall(opcode, code, re.MULTILINE)]
    count = collections.Counter(name[0] for name in opcodes)
    moved = collections.Counter[bool]()
    for name in opcodes:
        if name[0] in ("LDG", "STG", "LDGSTS"):
            moved["128" in name] += _bytes(name)
    return Report(
        registers=int(re.findall(r"REG:(\d+)", usage)[0]),
        stack=int(re.findall(r"STACK:(\d+)", usage)[0]),
        spills=count["LDL"] + count["STL"],
        atomics=sum(name[0] in ATOMICS and not {"OR", "AND"} & {*name} for name in opcodes),
        vector_share=moved[True] / max(1, moved.total()),
        loads=count["LDG"] + count["LDGSTS"],
        stores=count["STG"],
        instructions=len(opcodes),
    )


def _bytes(opcode: tuple[str, ...]) -> int:
    """Bytes one thread moves with a global load or store."""
    sizes = {"128": 16, "64": 8, "U16": 2, "S16": 2, "16": 2, "U8": 1, "S8": 1}
    return next((sizes[part] for part in opcode if part in sizes), 4)


class Task(NamedTuple):
    """The launches of one op on rows of one width and dtype."""

    op: str
    d: int
    dtype: str
    arch: int
    title: str  # only launches whose name holds this text

    def launches(self) -> dict[str, _launch.Launch]:
        x = torch.empty(ROWS, self.d, dtype=DTYPES[self.dtype], device="meta")
        launches = OPS[self.op].launches(x, torch.empty(self.d, device="meta"))
        return {title: launch for title, launch in launches.items() if self.title in title}


def inspect(task: Task) -> list[tuple[str, int, Report]]:
    """Compile every launch of a task; returns its name, warps and report."""
    return [
        (title, launch.config.warps, read(compile_launch(launch, task.arch)))
        for title, launch in task.launches().items()
    ]


def tasks(options: argparse.Namespace) -> list[Task]:
    return [
        Task(op, d, dtype, options.arch, options.op)
        for op in OPS
        for d in options.d or FEW.get(op, WIDTHS)
        for dtype in options.dtype
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="deeploop.kernels.aot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--arch", type=int, default=90, help="compute capability (default 90)")
    parser.add_argument("--d", type=int, nargs="+", help=f"row widths (default {WIDTHS})")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16", "fp32"])
    parser.add_argument("--op", default="", help="only launches whose name holds this text")
    options = parser.parse_args(argv)
    if _launch.triton is None or _launch.interpreting():
        print("aot needs Triton, and TRITON_INTERPRET unset", file=sys.stderr)
        return 2
    print(f"triton {_launch.triton.__version__}, sm_{options.arch}, float32 gains")
    print(
        f"{'launch':28}{'d':>6} {'dtype':6}{'warps':>6}{'regs':>6}{'spills':>7}{'stack':>6}"
        f"{'shared':>7}{'atomics':>8}{'128-bit':>8}{'loads':>6}{'stores':>7}{'instr':>6}"
    )
    failed = 0
    todo = [task for task in tasks(options) if task.launches()]
    workers = min(len(todo), os.cpu_count() or 1)
    with worker_pool(workers) as pool:
        for task, reports in zip(todo, pool.map(inspect, todo), strict=True):
            for title, warps, r in reports:
                print(
                    f"{title:28}{task.d:6} {task.dtype:6}{warps:6}{r.registers:6}{r.spills:7}"
                    f"{r.stack:6}{r.shared:7}{r.atomics:8}{r.vector_share:8.1%}{r.loads:6}"
                    f"{r.stores:7}{r.instructions:6}",
                    flush=True,
                )
                for failure in r.failures(task.d, task.arch, least_share(task.op)):
                    print(f"FAILED {title} d={task.d} {task.dtype}: {failure}", file=sys.stderr)
                    failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
