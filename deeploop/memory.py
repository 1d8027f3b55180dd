"""Bytes that a step holds at once, counted from the tensors it makes, real or fake.

    with Live() as live:
        step()
    live.peak

counts each storage that any operator returns until the last tensor on it is gone. Under
torch's FakeTensorMode nothing is allocated, so that a model of any size is counted on
any machine (`step_peak`). What an operator allocates and frees within itself is not
seen, nor is what the allocator keeps for later, nor a storage's growth by resize_.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deeploop import backprop
from deeploop.config import Config
from deeploop.lm import LoopLM
from deeploop.optim import adamw, clip_gradients, step_if_finite
from deeploop.visits import Stream


class Live(TorchDispatchMode):
    """Counts the bytes of storages made inside it: `now`, and the most there were, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return out

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def step_peak(config: Config, device: str = "cpu") -> int:
    """Peak bytes of a training step of one micro-batch, from its second step on; none allocated.

    Counts weights, gradients, AdamW's moments and activations, of `train.micro_batch`
    sequences (or the whole batch) under the run's plan and precision. With a step per
    segment each further micro-batch of an accumulated batch also keeps its stream and
    global memory between segments, which is not counted.
    """
    t, m = config.train, config.model
    rows = t.micro_batch or t.batch_size
    with FakeTensorMode(allow_non_fake_inputs=False), Live() as live, torch.device(device):
        model = LoopLM(m)
        optimizer = adamw(model, t)
        tokens = torch.zeros(rows, m.seq_len, dtype=torch.int64)
        for _ in range(2):  # the moments are made in the first
            live.peak = live.now
            carried: Stream | None = None
            for part in backprop.rounds(t, m.loops):
                for segment in part:
                    carried = backprop.backward(
                        model, config, segment, tokens, tokens, carried, None
                    ).carried
                step_if_finite(optimizer, clip_gradients(model, t.clip), t.lr)
                optimizer.zero_grad(set_to_none=True)
        return live.peak
