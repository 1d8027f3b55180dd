"""Measure the memory that this process may still take, and refuse what needs more."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from deeploop.utils.errors import InputError

# By version of Linux's control groups: files of the limit and of the use of a group's memory, and
# the lines of memory.stat that the kernel takes back before it ends a process.
CGROUP_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    2: ("memory.max", "memory.current"),
}
RECLAIMED = {
    1: ("total_inactive_file", "total_active_file"),
    2: ("inactive_file", "active_file", "slab_reclaimable"),
}


class FreeMemory(NamedTuple):
    """Bytes that this process may still take, and the limit that leaves the fewest."""

    bytes: int
    limit: str


def free_memory(device: torch.device) -> FreeMemory:
    """Return the bytes that this process may still take on a device.

    On a GPU: the free ones and those that PyTorch's allocator has cached. On a CPU: the least of
    the machine's available memory, the limits of the process's control groups (as containers and
    batch systems set them) and the limit on its address space (`ulimit -v`).
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return FreeMemory(torch.cuda.mem_get_info(device)[0] + cached, f"free on {device}")
    return min([_of_machine(), *cgroups(), *_of_address_space()])


def check_fits(needed: float, device: torch.device, fields: str, remedy: str) -> None:
    """Refuse work that needs more bytes than this process may take; raises InputError.

    Args:
        needed: bytes, at least; not those that are allocated already.
        device: the device that they would be on.
        fields: the fields that decide it, with their values, and the work, as the sentence's start.
        remedy: the sentence's end.
    """
    free = free_memory(device)
    if needed > free.bytes:
        raise InputError(
            f"{fields} needs at least {in_bytes(needed)} of memory, and this process may take "
            f"{in_bytes(free.bytes)} ({free.limit}); {remedy}"
        )


def in_bytes(n: float) -> str:
    """Format bytes in GiB, MiB or KiB."""
    if n >= 2**30:
        return f"{n / 2**30:,.2f} GiB"
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.0f} KiB"


def _of_machine() -> FreeMemory:
    """Return the machine's available memory; where it is not told, all of its memory."""
    available = _numbers(Path("/proc/meminfo")).get("MemAvailable:")
    if available is not None:
        return FreeMemory(1024 * available, "available on this machine")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return FreeMemory(total, "memory of this machine")


def _of_address_space() -> Iterator[FreeMemory]:
    """Yield what is left of the limit on the process's address space, if it has one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        pages = _words(Path("/proc/self/statm"))
        taken = int(pages[0]) * resource.getpagesize() if pages else 0
        yield FreeMemory(max(0, limit - taken), "limit on the address space, ulimit -v")


def cgroups(
    process: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[FreeMemory]:
    """Yield what each control group of this process leaves, up to the root of the hierarchy.

    Args:
        process: lists the groups of the process, a line for each hierarchy.
        root: where the hierarchies are mounted: memory's of version 1 under "memory", that of
            version 2 itself or under "unified".
    """
    for line in _text(process).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, mounts = 2, [root, root / "unified"]
        elif "memory" in controllers.split(","):
            version, mounts = 1, [root / "memory"]
        else:
            continue
        for mount in mounts:
            group = mount / path.lstrip("/")
            # In a container the path may be the host's: the group is then the mount itself.
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount):
                    yield from _of_cgroup(folder, version)


def _of_cgroup(folder: Path, version: int) -> Iterator[FreeMemory]:
    """Yield the bytes that one control group leaves; none where it has no limit."""
    limit, usage = (_words(folder / name) for name in CGROUP_FILES[version])
    if not usage or not limit or limit[0] == "max":
        return
    stat = _numbers(folder / "memory.stat")
    used = int(usage[0]) - sum(stat.get(name, 0) for name in RECLAIMED[version])
    yield FreeMemory(max(0, int(limit[0]) - max(0, used)), f"limit of the control group {folder}")


def _numbers(path: Path) -> dict[str, int]:
    """Read a file with a name and a number on each line; empty where it cannot be read."""
    pairs = (line.split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    """Read a file of the kernel; "" where this system does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
