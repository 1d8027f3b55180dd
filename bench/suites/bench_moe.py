"""Routed experts, forward and backward: one dispatch for all experts against a loop over them.

    pytest bench/suites/bench_moe.py -s [--benchmark-json=FILE]

A whole MoE visit: router, 32 experts of which a token takes 6, the weighted sum, the residual
rule and the norms around it. Contenders take turns in one run and share weights, router and
residual rule:

* grouped_mm: the layer as shipped (`deeploop.model.moe.layer.MoE`, `expert_combine`);
* loop: the same layer with the backend `reference`, one expert after another by autograd;
* modules: the code that one would write first, a module for each expert: its tokens
  (index_select), three linear layers, weighted rows added in place (index_add). Each expert's
  matrices are separate leaves, so that no gradient has to be stacked; autocast casts them;
* megablocks: its dropless MLP after our router, on CUDA in bfloat16 where it imports.

All must agree before anything is timed. The floor reads every weight forward and backward and
writes its gradient, in float32, and moves the stream and its norm as the residual rule does
(2 passes forward, 3 backward, each); the FLOPs are those of the chosen experts and the router.

On a CPU the ratio depends on other processes and on page faults, so the record holds the load
average before the first call and the page faults of one call. glibc maps tensors of 32 MiB and
more anew at every step, 96 MB of gradients here, while the loop's small matrices come back from
the heap. So freed memory stays in the process, for every contender. (In training this is not
needed: the heap was seen to grow by itself.)
"""

import contextlib
import ctypes
import os
import resource

import pytest
import torch
import torch.nn.functional as F

from bench.harness.record import Work, one_line
from bench.harness.timing import relative_error
from deeploop.kernels import branch_sandwich, expert_combine, sigmoid_router
from deeploop.model.moe.layer import MoE
from deeploop.utils.device import autocast, computes_in_bf16, pick_device
from deeploop.utils.errors import InputError

DEVICE = pick_device("auto")
EXPERTS, TOP_K, D_MODEL, D_EXPERT = 32, 6, 512, 512
SCALE = 0.1
# On CUDA the host has to be waited for in the loop; more tokens show the GEMMs.
TOKENS = (128, 4096, 65536) if DEVICE.type == "cuda" else (128, 4096)
FUSED = ("sigmoid_router_forward", "expert_combine_forward")
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


def keep_freed_memory():
    """Make glibc, if it is the C library, never map an allocation and never trim the heap."""
    trim_threshold, mmap_max = -1, -4  # of malloc.h
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)


class PlainLoop(torch.nn.Module):
    """The experts of a MoE as separate matrices, run one after another."""

    def __init__(self, moe: MoE):
        super().__init__()
        gate, up = moe.gate_up.detach().chunk(2, dim=1)
        stacks = {"gate": gate, "up": up, "down": moe.down.detach()}
        for name, stack in stacks.items():
            matrices = (torch.nn.Parameter(w.clone()) for w in stack)
            setattr(self, name, torch.nn.ParameterList(matrices))
        self.router = torch.nn.Parameter(moe.routers[0].detach().clone())
        self.bias = moe.bias

    def forward(self, n):
        weights, indices, _, z = sigmoid_router(n, self.router, self.bias, TOP_K)
        y = torch.zeros_like(n)
        experts = zip(self.gate, self.up, self.down, strict=True)
        for expert, (gate, up, down) in enumerate(experts):
            token, slot = (indices == expert).nonzero(as_tuple=True)
            x = n.index_select(0, token)
            expert_out = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
            y.index_add_(0, token, (expert_out * weights[token, slot, None]).to(y.dtype))
        return y, z

    def stacked_gradients(self):
        gate, up, down = (
            torch.stack([w.grad for w in ws]) for ws in (self.gate, self.up, self.down)
        )
        return [torch.cat((gate, up), dim=1), down, self.router.grad]


def one_dispatch(moe, h, n):
    routed = moe(n, moe.router(0))
    return *expert_combine(h, *routed[:4], None, None, SCALE), routed.z


def plain_loop(layer, h, n):
    y, z = layer(n)
    return *branch_sandwich(h, y, None, None, SCALE), z


def step(visit, layer, inputs, gradients, precision):
    """Run forward and backward with fresh gradients; returns the outputs and n's gradient."""
    h, n = inputs
    n.grad = None
    layer.zero_grad(set_to_none=True)
    with autocast(DEVICE, precision):
        outputs = visit(layer, h, n)
    torch.autograd.backward(outputs, gradients)
    return [*(y.detach() for y in outputs), n.grad]


def layers(precision, missing):
    """Make the contenders, with the same weights; `missing` gets the reason for no megablocks."""
    torch.manual_seed(0)
    sizes = (D_MODEL, EXPERTS, TOP_K, D_EXPERT, 0, 1, 0.0)
    moe = MoE(*sizes).to(DEVICE)
    loop = MoE(*sizes, "reference").to(DEVICE)
    loop.load_state_dict(moe.state_dict())
    result = {
        "grouped_mm": (one_dispatch, moe),
        "loop": (one_dispatch, loop),
        "modules": (plain_loop, PlainLoop(moe)),
    }
    if DEVICE.type != "cuda" or precision != "bf16":
        missing["megablocks"] = "only on CUDA in bfloat16"
    else:
        try:
            peer = MoE(*sizes, "megablocks").to(DEVICE)
            peer.load_state_dict(moe.state_dict())
            result["megablocks"] = (one_dispatch, peer)
        except InputError as error:
            missing["megablocks"] = str(error)
    return result


def page_faults(run):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def parameter_gradients(layer):
    if isinstance(layer, PlainLoop):
        return layer.stacked_gradients()
    return [layer.gate_up.grad, layer.down.grad, layer.routers[0].grad]


def work(tokens: int, itemsize: int) -> Work:
    expert = 3 * D_MODEL * D_EXPERT
    weights = EXPERTS * (expert + D_MODEL)
    stream = 5 * tokens * D_MODEL * (4 + itemsize)
    flops = 3 * 2 * tokens * (TOP_K * expert + EXPERTS * D_MODEL)
    return Work(3 * 4 * weights + stream, flops, tokens)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_routed_experts(benchmark, machine, tokens, precision):
    if precision == "bf16" and not computes_in_bf16(DEVICE):
        pytest.skip("this CPU emulates bfloat16: a loop's step takes ten times as long")
    keep_freed_memory()
    load = os.getloadavg()[0]
    missing: dict[str, str] = {}
    contenders = layers(precision, missing)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    h = torch.randn(tokens, D_MODEL, device=DEVICE)
    inputs = (h, torch.randn_like(h).to(dtype).requires_grad_())
    gradients = (torch.randn_like(h), torch.randn_like(h).to(dtype), torch.ones_like(h[0, 0]))
    runs = {
        name: lambda visit=visit, layer=layer: step(visit, layer, inputs, gradients, precision)
        for name, (visit, layer) in contenders.items()
    }
    results = {
        name: [*run(), *parameter_gradients(contenders[name][1])] for name, run in runs.items()
    }
    for name, values in results.items():
        for value, expected in zip(values, results["modules"], strict=True):
            error = relative_error(value, expected)
            assert error < TOLERANCE[precision], f"{name} is off by {error:.1e}"
    slow = DEVICE.type == "cpu" and tokens > 1000
    existing = {
        name: [*layer.parameters(), *inputs, *gradients] for name, (_, layer) in contenders.items()
    }
    rounds, fused = 7 if slow else 31, {"grouped_mm": FUSED}
    entries = machine.compare(runs, existing, rounds, fused, opaque=("megablocks",))
    for name, entry in entries.items():
        entry["page_faults"] = page_faults(runs[name])
    case = {"tokens": tokens, "experts": EXPERTS, "top_k": TOP_K}
    others = [name for name in entries if name != "grouped_mm"]
    benchmark.extra_info |= machine.record(
        "experts", case, dtype, work(tokens, dtype.itemsize), entries, others, missing
    )
    benchmark.extra_info["load_average_before"] = load
    print(f"\n{one_line(benchmark.extra_info)}")
    benchmark.pedantic(runs["grouped_mm"], rounds=1)
