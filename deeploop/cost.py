"""What training costs: FLOPs of a model, and the peaks of the devices it may run on.

Model FLOPs are those of the matrix products that the loss needs: loops as they run, the
head once for each loss, attention over all T x T pairs, no recomputation. A token of a
model of V x d embedding, R loops over K blocks of width d and T tokens a sequence costs

    6 V d + R K (6 * weights of a block + 12 d T)       weights that the token meets

forward and backward together; MFU is that over the device's peak.
"""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deeploop.backprop import segments
from deeploop.config import Config, ModelConfig


class Device(NamedTuple):
    """Peaks of one device, dense and without boost claims: the maker's data sheet."""

    title: str
    bf16: float  # FLOP/s of bfloat16 matrix products
    fp32: float  # FLOP/s of float32 matrix products, without TF32
    bandwidth: float  # bytes/s of memory
    memory: float  # bytes


DEVICES = {
    "h200": Device("H200 SXM", 989e12, 67e12, 4.8e12, 141e9),
    "h100": Device("H100 SXM", 989e12, 67e12, 3.35e12, 80e9),
    "a100": Device("A100 SXM 80 GB", 312e12, 19.5e12, 2.039e12, 80e9),
    "b200": Device("B200", 2250e12, 75e12, 7.7e12, 180e9),
}


def this_cpu() -> Device:
    """This machine's own ceilings, measured in about a second: products and a copy.

    Each is the best of a few runs on the threads torch has, products of 1024 x 1024 and a
    copy of 256 MiB. Memory is all the machine has.
    """
    fp32, bf16 = (
        2 * 1024**3 / _best(torch.nn.functional.linear, *torch.ones(2, 1024, 1024, dtype=dtype))
        for dtype in (torch.float32, torch.bfloat16)
    )
    x, y = torch.ones(2, 2**26)
    title = f"this CPU ({torch.get_num_threads()} threads)"
    return Device(title, bf16, fp32, 2 * x.nbytes / _best(x.copy_, y), host_memory())


def host_memory() -> int:
    """Bytes of memory this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _best(work: Callable[..., object], *inputs: Tensor) -> float:
    """Seconds of the quickest of a few runs behind the first."""
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        work(*inputs)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def device_of(name: str) -> Device | None:
    """The entry of DEVICES for what `device_name` says; None for one without an entry."""
    found = [d for key, d in DEVICES.items() if key in name.lower()]
    return found[0] if found else None


def block_weights(m: ModelConfig) -> int:
    """Weights of one block's matrices that a token meets in a visit."""
    d, e = m.d_model, m.moe
    if not e.experts:
        return 4 * d * d + 3 * d * m.ff_width
    return 4 * d * d + 3 * d * (e.d_expert or d) * (e.top_k + e.shared) + e.experts * d


def forward_flops(m: ModelConfig, loops: int) -> float:
    """Forward FLOPs of one token through some loops, without the head."""
    return loops * m.n_layers * (2 * block_weights(m) + 4 * m.d_model * m.seq_len)


def weight_flops(m: ModelConfig) -> float:
    """FLOPs of a token as 6 for each weight it meets, in every loop; attention left out."""
    return 6 * (m.vocab_size * m.d_model + m.loops * m.n_layers * block_weights(m))


def flops_per_token(config: Config) -> float:
    """Model FLOPs of one token of one batch: forward and, where the plan goes, backward.

    Loops that the plan runs without gradient count their forward alone; under `segments`
    each segment's loss is a pass through the head.
    """
    m = config.model
    head = 2 * m.vocab_size * m.d_model
    return sum(
        forward_flops(m, len(s.ahead)) + 3 * (forward_flops(m, len(s.loops)) + head)
        for s in segments(config.train, m.loops)
    )
