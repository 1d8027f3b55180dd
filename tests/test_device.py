"""What a run asks of the machine."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from deeploop.device import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**24)  # 64 MiB
before = faults()
for _ in range(4):
    torch.ones(2**24)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the switch")
def test_freed_memory_of_large_tensors_is_used_again():
    kept, fresh = (
        int(subprocess.check_output([sys.executable, "-c", FAULTS, how]))
        for how in ("keep", "leave")
    )
    assert kept < 100
    assert fresh > 10 * kept  # in pages of 4 KiB 65,536, in huge ones fewer
