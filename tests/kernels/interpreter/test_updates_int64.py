"""Offsets past 2^31, on a buffer whose pages exist only where they are touched.

Every row holds the same values, so the last one, past 2^31, must come out like the
first. A kernel with 32-bit offsets would crash the process: each runs in its own.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, resource, sys
import numpy as np
import torch

name, d = sys.argv[1], int(sys.argv[2])
module = importlib.import_module(f"deeploop.kernels.{name}")
torch.manual_seed(0)
D, SLOT, BLOCK, ROWS = 2**30 + 256, 256, 64, 3  # row 2 starts past 2^31
WRITTEN = ("h_new", "local_new", "glob_new", "n", "dh", "df", "dlocal", "dglob")
x = torch.zeros(ROWS, d)
for kind, launch in module.aot_launches(x, None).items():
    buffer = torch.from_numpy(np.zeros(ROWS * D + 16 * SLOT, dtype=np.float16))
    args, views = dict(launch.args), {}
    for slot, (key, value) in enumerate(args.items()):
        if not isinstance(value, torch.Tensor):
            continue
        if value.dim() == 1:
            args[key] = torch.ones(ROWS)
            continue
        view = buffer[len(views) * SLOT :][: ROWS * D].view(ROWS, D)
        view[:, :SLOT] = torch.randn(1, SLOT)
        args[key] = views[key] = view
    # h_new_ptr is written by a forward launch and read by a backward one.
    written = [k for k in views if k.removesuffix("_ptr") in WRITTEN]
    if kind.endswith("backward"):
        written = [k for k in written if k.startswith("d") and "new" not in k and k != "dn_ptr"]
    for key in written:
        views[key][:, :SLOT] = float("nan")
    args |= {"D": D, "BLOCK": BLOCK} | ({"ROWS": 1} if "ROWS" in args else {})
    launch._replace(args=args, grid=min(launch.grid, 2) if "n_chunks" in args else ROWS).run(x)
    used = SLOT if "CHUNKS" in args else BLOCK
    assert len(written) >= 2
    for key in written:
        first, last = views[key][0, :used], views[key][2, :used]
        assert first.isfinite().all() and first.any(), f"{kind}: {key} not written"
        assert torch.equal(first, last), f"{kind}: {key} differs past 2^31"
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
assert peak < 1.5, f"{peak:.1f} GiB resident"
"""


@pytest.mark.parametrize("name", ["branch_sandwich", "looping_update"])
@pytest.mark.parametrize("d", [64, 4096], ids=["held", "chunks"])
def test_offsets_past_two_to_the_31(name, d):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(d)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr[-2000:]}"
