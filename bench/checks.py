"""Checks on a device before anything is timed; each prints one line or raises.

    python -m bench.checks environment     what this machine is
    python -m bench.checks warm            compile every kernel the other two run
    python -m bench.checks once            every op forward and backward, small and odd shapes
    python -m bench.checks determinism     the same bits twice

`once` is what compute-sanitizer watches. --device cpu runs the same code without
a GPU.
"""

from __future__ import annotations

import argparse
import platform
import sys

import torch
from torch import Tensor

from bench.ops import OPS, Op
from deeploop import kernels
from deeploop.kernels import _launch
from deeploop.utils.device import device_name, pick_device

# Odd widths and the last row block half empty; every kind of launch once.
SMALL = [
    (5, 1000, torch.float32),
    (5, 1000, torch.bfloat16),
    (33, 768, torch.bfloat16),
    (37, 4096, torch.bfloat16),
    (3, 16384, torch.bfloat16),
]
LARGE = [(4099, 768), (2051, 4096), (517, 16384)]


def environment(device: torch.device) -> None:
    triton = _launch.triton.__version__ if _launch.triton else "none"
    parts = [
        device_name(device),
        f"torch {torch.__version__}",
        f"triton {triton}",
        f"Python {platform.python_version()}",
    ]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        parts += [
            f"sm_{properties.major}{properties.minor}",
            f"{properties.multi_processor_count} SMs",
            f"{properties.total_memory / 2**30:.0f} GiB",
            f"L2 {properties.L2_cache_size / 2**20:.0f} MiB",
            f"CUDA {torch.version.cuda}",
        ]
    print(", ".join(parts))


def results(op: Op, inputs: list[Tensor]) -> list[Tensor]:
    """Every output and gradient."""
    outputs = [y for y in op.run(getattr(kernels, op.name), inputs) if y is not None]
    used = [y for y in outputs if y.requires_grad]
    generator = torch.Generator(inputs[0].device).manual_seed(1)
    gradients = [
        torch.randn(y.shape, device=y.device, generator=generator).to(y.dtype) for y in used
    ]
    leaves = [x for x in inputs if x.requires_grad]
    return [*outputs, *torch.autograd.grad(used, leaves, gradients)]


def once(device: torch.device) -> None:
    for op in OPS:
        for case in SMALL:
            for x in results(op, op.make_inputs(*case, device)):
                assert x.isfinite().all(), f"{op.name} {case}: not finite"
    print(f"{len(OPS)} ops at {len(SMALL)} shapes: finite")


def determinism(device: torch.device) -> None:
    for op in OPS:
        for shape in LARGE:
            inputs = op.make_inputs(*shape, torch.bfloat16, device)
            first, second = results(op, inputs), results(op, inputs)
            for i, (a, b) in enumerate(zip(first, second, strict=True)):
                assert torch.equal(a, b), f"{op.name} {shape}: result {i} differs between two runs"
    print(f"{len(OPS)} ops at {len(LARGE)} shapes: same bits twice")


CHECKS = {"environment": environment, "warm": once, "once": once, "determinism": determinism}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.checks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    CHECKS[options.check](pick_device(options.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
