"""Data parallelism over the ranks of torchrun: one replica of the model each, gradients summed.

torch's DistributedDataParallel is not used. Its reducer expects the same parameters to get
a gradient in every backward, or searches the graph for those that do not, and a segment
reaches the routers of its own loops only. The advantage of DDP, sending gradients while
backward still runs, is small for a looped model: the gradient of a shared weight is
complete only when backward has reached the first loop.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from deeploop.utils.errors import InputError
from deeploop.utils.launcher import place
from deeploop.utils.spans import span

T = TypeVar("T")
BUCKET_BYTES = 2**26  # of one message: its tensors are copied into one buffer and back


class Ranks(NamedTuple):
    """The index of this process and the number of processes that train together."""

    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes files and prints."""
        return self.rank == 0

    def local_rows(self, batch: int) -> range:
        """Return the rows of a global batch of `batch` sequences that this rank trains on.

        Raises InputError if the ranks cannot have equally many.
        """
        if batch % self.world:
            raise InputError(
                f"train.batch_size={batch}: must be a multiple of the {self.world} ranks"
            )
        count = batch // self.world
        return range(self.rank * count, (self.rank + 1) * count)

    def all_reduce_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks; shapes must agree on every rank."""
        if self.world == 1:
            return
        with span("communication"):
            for bucket in buckets(tensors):
                flat = torch.cat([t.reshape(-1) for t in bucket])
                dist.all_reduce(flat)
                sums = flat.split([t.numel() for t in bucket])
                for t, summed in zip(bucket, sums, strict=True):
                    t.copy_(summed.view_as(t))

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, in order of rank, along the first axis.

        Shapes and dtypes must agree on every rank.
        """
        if self.world == 1:
            return tensor
        with span("communication"):
            parts = [torch.empty_like(tensor) for _ in range(self.world)]
            dist.all_gather(parts, tensor)
            return torch.cat(parts)

    def any_rank(self, flag: bool) -> bool:
        """Return True on every rank if `flag` is true on at least one; does not wait for a GPU."""
        if self.world == 1:
            return flag
        return self.first_rank(flag) is not None

    def first_rank(self, flag: bool) -> int | None:
        """Return the lowest rank where `flag` is true, the same on every rank; None without one."""
        first = torch.tensor(self.rank if flag else self.world)
        if self.world > 1:
            dist.all_reduce(first, dist.ReduceOp.MIN)
        return int(first) if first < self.world else None

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank, in order of rank; it is pickled, and should be small."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group consecutive tensors of one dtype into lists of up to BUCKET_BYTES, one message each."""
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
def init_distributed() -> Iterator[Ranks]:
    """Join the process group that torchrun's environment describes, and leave it at the end.

    Yields one rank of one where that environment is absent.

    Raises:
        InputError: the environment is incomplete or wrong, or the other ranks cannot be reached.
    """
    here = place()
    if here.world == 1:
        yield Ranks()
        return
    cuda = torch.cuda.is_available()
    if cuda:
        gpus = torch.cuda.device_count()
        if here.local_rank >= gpus:
            raise InputError(
                f"LOCAL_RANK={here.local_rank}: this machine has {gpus} GPUs; start at most as "
                "many processes"
            )
        torch.cuda.set_device(here.local_rank)
    try:
        # gloo beside nccl reduces tensors of the host, so that `any_rank` waits for no GPU.
        store, rank, world = next(dist.rendezvous("env://"))
        # torchrun's store outlives a restart, with the addresses of the ranks that have died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=world,
        )  # fmt: skip
    except RuntimeError as error:  # gloo raises a plain one, torch its DistError
        address = ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise InputError(
            f"MASTER_ADDR and MASTER_PORT, {address}: rank {here.rank} cannot join the "
            f"{here.world} ranks there: {str(error).splitlines()[0]}"
        ) from error
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def local_rank() -> int:
    """Return this rank's index on its machine, which is also that of its GPU."""
    return place().local_rank
