"""Predict the seconds of a step on a device by a roofline over its operators.

    clock = Clock(device, GPU, vocab_size)
    with LiveBytes(clock=clock):
        step()
    clock.seconds, clock.host

An operator with matrix products takes the longer of two times: its FLOPs over the device's
FLOP/s, and its bytes over the device's bandwidth, each multiplied by the share of it that
kernels reach (`Efficiency`). Any other operator takes the time of its bytes alone: each input
is read once, each output written once. A view takes no time. An operator made of several
passes is counted pass by pass (`experts`).
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

from deeploop.analyze.plan.hardware import Device
from deeploop.kernels import registry

aten = torch.ops.aten
FLOPS = flop_registry | {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}
# These touch only the rows of their first argument that they take or add to.
SPARSE = {
    aten.embedding, aten.index_select, aten.gather, aten.scatter_add_, aten.nll_loss_forward,
}  # fmt: skip
# These do not read their first argument: they write it, or need only its sizes.
UNREAD = {
    aten.zero_, aten.fill_, aten.copy_, aten.zeros_like, aten.ones_like, aten.full_like,
    aten.new_zeros, aten.new_ones, aten.new_full,
}  # fmt: skip
# PyTorch's kernel reads a row three times, for its maximum, its sum and its result, unless the
# row fits in shared memory.
SOFTMAX, SOFTMAX_WIDTH = {aten._softmax, aten._log_softmax}, 12 * 1024
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class Efficiency(NamedTuple):
    """The share of a device's peaks that kernels reach."""

    gemm: float  # of the FLOP/s of matrix products
    attention: float  # ... with all T x T pairs counted, of which causal kernels skip half
    grouped: float  # ... in the experts
    stream: float  # of the memory's bandwidth
    updates: float  # ... in the kernels of residual updates, experts' combination and router
    launch: float  # seconds the host takes an operator


# Fitted to one H200 (gpt2-small, 32 x 1024 tokens): to the time that six more loops take, with
# --train.compile and without. Those two differences determine `stream` and the sum of `gemm`
# and `attention`, whose split is assumed. `updates` is the share of the copy bandwidth that
# post_sandwich was measured at, forward and backward weighted by their bytes. The four step
# times then come out 2 to 15% too short: the time of a step outside of its loops, most of it at
# R = 1, is not fully explained. `grouped` and `launch` are assumed: no mixture of experts and no
# other GPU has been timed.
GPU = Efficiency(gemm=0.62, attention=0.5, grouped=0.4, stream=0.79, updates=0.6, launch=8e-6)
MEASURED = Efficiency(1.0, 1.0, 1.0, 1.0, 1.0, 0.0)  # for a device whose peaks were measured


class Work(NamedTuple):
    """FLOPs and bytes of one pass, and the component of the step that it belongs to."""

    component: str
    flops: float
    bytes: float


class Clock:
    """Add up the seconds of operators by component of the step; `memory.LiveBytes` calls it.

    Attributes:
        seconds: the device's, by component.
        host: seconds that the host takes to launch the operators.
    """

    def __init__(self, device: Device, efficiency: Efficiency, vocab_size: int) -> None:
        self.device, self.efficiency, self.vocab_size = device, efficiency, vocab_size
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.host = 0.0
        self.times, self.share, self.component = 1, 1.0, ""
        self.closed = False

    @contextlib.contextmanager
    def repeat(self, times: int, share: float = 1.0, component: str = "") -> Iterator[None]:
        """Multiply the time of each operator inside by times * share, under `component`."""
        self.times, self.share, self.component = times, share, component
        yield
        self.times, self.share, self.component = 1, 1.0, ""

    @contextlib.contextmanager
    def instead(self, passes: list[Work]) -> Iterator[None]:
        """Count these passes in the place of the operators that run inside."""
        for work in passes:
            self.count(work, True)
        self.closed = True
        yield
        self.closed = False

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count one operator that has run, from its arguments and its result."""
        if self.closed or func.overloadpacket in EMPTY:
            return
        inputs, outputs = tensors((args, kwargs)), tensors(out)
        if views(func, inputs, outputs):
            return
        head = func.namespace == "aten" and any(
            x.dim() == 2 and self.vocab_size in x.shape for x in (*inputs, *outputs)
        )
        bf16 = any(x.dtype == torch.bfloat16 for x in inputs)
        for work in works(func, args, kwargs, out, inputs, outputs):
            self.count(work._replace(component="head and loss") if head else work, bf16)

    def count(self, work: Work, bf16: bool) -> None:
        """Add one pass as often as the surrounding `repeat` says."""
        self.host += self.times * self.efficiency.launch
        seconds = self.times * self.share * self.time(work, bf16)
        self.seconds[self.component or work.component] += seconds

    def time(self, work: Work, bf16: bool) -> float:
        """Return the seconds of one pass on the device."""
        d, e = self.device, self.efficiency
        reached = e.updates if work.component == "updates" else e.stream
        moving = work.bytes / (d.bandwidth * reached)
        if not work.flops:
            return moving
        share = {"attention": e.attention, "experts": e.grouped}.get(work.component, e.gemm)
        return max(moving, work.flops / ((d.bf16 if bf16 else d.fp32) * share))


def tensors(tree: Any) -> list[Tensor]:
    """List the tensors in nested arguments or results."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def views(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Return whether an operator makes no new memory and writes none: a view."""
    if func._schema.is_mutable:
        return False
    known = {x.untyped_storage()._cdata for x in inputs}
    return func.is_view or all(x.untyped_storage()._cdata in known for x in outputs)


def size(x: Tensor) -> int:
    """Return the bytes of a tensor's elements in memory: expanded dimensions count once."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return x.element_size() * math.prod(n for n, stride in sizes if stride or not n)


def works(
    func: Any, args: Any, kwargs: Any, out: Any, inputs: list[Tensor], outputs: list[Tensor]
) -> list[Work]:
    """Return the passes of one operator."""
    packet, name = func.overloadpacket, func.name()
    if registry.component(name) == "experts":
        backward = name.endswith("_backward")  # its first argument is the gradient
        x, gate_up, down, token = args[backward : backward + 4]
        return experts(x, gate_up, down, token, backward)
    read, written = sum(map(size, inputs)), sum(map(size, outputs))
    if packet in SPARSE:  # the other inputs are indices and values
        others = sum(map(size, inputs[1:]))
        read = written = others if func._schema.is_mutable else others + written
    elif packet in UNREAD:
        read -= size(inputs[0])
    elif packet in SOFTMAX and outputs[0].shape[-1] > SOFTMAX_WIDTH:
        read *= 3
    elif func._schema.is_mutable and not outputs:
        written = read
    flops = FLOPS[packet](*args, **kwargs, out_val=out) if packet in FLOPS else 0
    return [Work(component_of(func, bool(flops)), flops, read + written)]


def component_of(func: Any, products: bool) -> str:
    """Name an operator's component by its name: attention, GEMM, updates or elementwise."""
    name = func.name()
    if "scaled_dot_product" in name or name in ("aten::bmm", "aten::baddbmm"):
        return "attention"
    if products:
        return "GEMM"
    # The router is a fused pass over rows too, and takes the time of one.
    return "updates" if registry.component(name) else "elementwise"


def experts(x: Tensor, gate_up: Tensor, down: Tensor, token: Tensor, backward: bool) -> list[Work]:
    """Return the passes of the op `experts` over S rows: three products forward, six backward."""
    rows, width, inner = token.shape[0], x.shape[1], down.shape[2]
    item, weights = x.element_size(), gate_up.numel() + down.numel()
    flops = 2 * rows * weights / down.shape[0]
    wide, deep = rows * width * item, rows * inner * item
    cast = weights * (4 + item)  # weights to the products' dtype, or gradients back from it
    if not backward:
        glue = 2 * wide + 5 * deep + cast
        return [Work("experts", flops, 2 * wide + 3 * deep), Work("experts", 0, glue)]
    glue = 3 * wide + size(x) + 14 * deep + 2 * cast
    return [Work("experts", 2 * flops, 5 * wide + 8 * deep), Work("experts", 0, glue)]
