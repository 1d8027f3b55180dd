"""Branches as torch.compile runs them: tensors saved for backward, bytes that kernels move."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deeploop.analyze.plan.fusion import backend
from deeploop.analyze.plan.hardware import DEVICES
from deeploop.analyze.plan.memory import LiveBytes
from deeploop.analyze.plan.roofline import GPU, Clock
from deeploop.model.mlp import SwiGLU


def test_a_compiled_swiglu_saves_and_moves_the_inputs_of_its_products():
    """Of f inner columns: gate, up and their product are saved; silu(gate) is recomputed."""
    n_rows, d, f = 512, 64, 128
    clock = Clock(DEVICES["h200"], GPU._replace(stream=1.0), 0)
    with FakeTensorMode(), LiveBytes(clock=clock) as live:
        branch = SwiGLU(d, f)
        branch.compile(backend=backend(clock), dynamic=False)
        n = torch.zeros(n_rows, d, requires_grad=True)
        before = live.now
        clock.seconds.clear()
        out = branch(n, None)
        assert live.now - before == 4 * n_rows * (3 * f + d)
        moved = clock.seconds["elementwise"] * DEVICES["h200"].bandwidth
        assert round(moved) == 4 * n_rows * 3 * f  # reads gate and up, writes their product
        clock.seconds.clear()
        out.sum().backward()
    assert clock.seconds["GEMM"] > 0
