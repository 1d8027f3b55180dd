"""Free memory is the least of all limits, and what needs more is refused in one sentence."""

import resource
import sys

import pytest
import torch

from deeploop.utils import memory
from deeploop.utils.memory import FreeMemory, cgroups, check_fits, free_memory
from tests.helpers.data import refused

CPU = torch.device("cpu")
GIB = 2**30


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def lowest(process, root):
    return min([*cgroups(process, root)]).bytes


def test_a_group_of_version_2_leaves_what_it_and_those_above_it_leave(tmp_path):
    """Cached files are taken back by the kernel, so they count as free."""
    process, root = tmp_path / "self", tmp_path / "fs"
    process.write_text("0::/batch/job\n")
    write(root / "batch/job", memory__max="max", memory__current=5 * GIB)
    write(root / "batch", memory__max=8 * GIB, memory__current=6 * GIB)
    assert lowest(process, root) == 2 * GIB
    (root / "batch" / "memory.stat").write_text(f"anon {GIB}\ninactive_file {GIB}\n")
    assert lowest(process, root) == 3 * GIB
    write(root, memory__max=6 * GIB, memory__current=6 * GIB)
    assert lowest(process, root) == 0


def test_a_group_of_version_1_and_a_container_that_sees_itself_as_the_root(tmp_path):
    """Under docker the process has the path of the host, and the mount is the container's group."""
    process, root = tmp_path / "self", tmp_path / "fs"
    process.write_text("5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    write(
        root / "memory",
        memory__limit_in_bytes=4 * GIB,
        memory__usage_in_bytes=3 * GIB,
        memory__stat=f"inactive_file 7\ntotal_inactive_file {GIB}",
    )
    assert lowest(process, root) == 2 * GIB
    assert not [*cgroups(tmp_path / "absent", root)]


def test_the_least_limit_counts_and_is_named(monkeypatch):
    group = FreeMemory(3 * GIB, "limit of the control group /x")
    monkeypatch.setattr(memory, "cgroups", lambda: [group])
    monkeypatch.setattr(memory, "_of_machine", lambda: FreeMemory(4 * GIB, "machine"))
    assert free_memory(CPU) == group
    check_fits(3 * GIB, CPU, "a", "b")
    refused(
        lambda: check_fits(3 * GIB + 1, CPU, "model.loops=9: a step", "give fewer loops"),
        "model.loops=9: a step needs at least 3.00 GiB",
        "may take 3.00 GiB (limit of the control group /x); give fewer loops",
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_limit_on_the_address_space_leaves_what_is_not_mapped_yet(monkeypatch):
    limit = 2**62
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    (free,) = memory._of_address_space()
    assert "ulimit -v" in free.limit
    assert 2**26 < limit - free.bytes < 2**50  # the interpreter and torch are mapped
