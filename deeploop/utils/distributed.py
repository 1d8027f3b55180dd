"""Data parallelism over the ranks of torchrun: the same model on each, gradients summed.

Not torch's DistributedDataParallel: its reducer wants the same parameters to get a
gradient in every backward, or searches the graph for those that do not, and a segment
touches the routers of its own loops only. Its gain would be to send gradients while
backward still runs, and a looped model has little to gain there: the gradient of a
shared weight is whole only when backward has reached the first loop.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from deeploop.utils.errors import InputError
from deeploop.utils.spans import span

BUCKET_BYTES = 2**26  # of one message; what is copied twice while it is on its way


class Ranks(NamedTuple):
    """This process's place among those that train together."""

    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this one writes files and speaks."""
        return self.rank == 0

    def local_rows(self, batch: int) -> range:
        """Its rows of a global batch."""
        if batch % self.world:
            raise InputError(
                f"train.batch_size={batch}: must be a multiple of the {self.world} ranks"
            )
        own = batch // self.world
        return range(self.rank * own, (self.rank + 1) * own)

    def all_reduce_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks; same shapes on every rank."""
        if self.world == 1:
            return
        with span("communication"):
            for bucket in _buckets(tensors):
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.all_reduce(flat)
                parts = flat.split([t.numel() for t in bucket])
                for t, part in zip(bucket, parts, strict=True):
                    t.copy_(part.view_as(t))

    def any_rank(self, flag: bool) -> bool:
        """Whether it is true on some rank; does not wait for a GPU."""
        if self.world == 1:
            return flag
        said = torch.tensor(int(flag))
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors of one dtype, up to the size of a message."""
    bucket: list[Tensor] = []
    size = 0
    for t in tensors:
        if bucket and (t.dtype != bucket[0].dtype or size + t.nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(t)
        size += t.nbytes
    if bucket:
        yield bucket


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    """The ranks that torchrun's environment describes; one without it."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank())
    # gloo beside nccl carries the tensors of the host: `any` then waits for no GPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def local_rank() -> int:
    """Which of this machine's ranks, and so which of its GPUs."""
    return int(os.environ.get("LOCAL_RANK", "0"))
