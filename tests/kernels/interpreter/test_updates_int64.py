"""Offsets past 2^31, on a buffer whose pages exist only where they are touched.

Every row holds the same values, so the last one, past 2^31, must come out like the
first. A kernel with 32-bit offsets would crash the process: each runs in its own.
The chunked kernels are not here: their row counter is a Python integer under the
interpreter and cannot overflow, so that is tested on a device.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import importlib, resource, sys
import numpy as np
import torch

name = sys.argv[1]
module = importlib.import_module(f"deeploop.kernels.{name}")
torch.manual_seed(0)
D, BLOCK, ROWS = 2**30 + 256, 64, 3  # row 2 starts past 2^31
WRITTEN = {
    "forward": ("h_new_ptr", "local_new_ptr", "glob_new_ptr", "n_ptr"),
    "backward": ("dh_ptr", "df_ptr", "dlocal_ptr", "dglob_ptr"),
}
x = torch.zeros(ROWS, BLOCK)
for kind, launch in module.aot_launches(x, None).items():
    buffer = torch.from_numpy(np.zeros(ROWS * D + 16 * BLOCK, dtype=np.float16))
    args, views = dict(launch.args), {}
    for key, value in args.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.dim() == 1:
            args[key] = torch.ones(ROWS)
            continue
        view = buffer[len(views) * BLOCK :][: ROWS * D].view(ROWS, D)
        view[:, :BLOCK] = torch.randn(1, BLOCK)
        args[key] = views[key] = view
    written = [key for key in WRITTEN[kind.split()[-1]] if key in views]
    for key in written:
        views[key][:, :BLOCK] = float("nan")
    args |= {"D": D, "BLOCK": BLOCK, "ROWS": 1}
    launch._replace(args=args, grid=ROWS).run(x)
    assert len(written) >= 2
    for key in written:
        first, last = views[key][0, :BLOCK], views[key][2, :BLOCK]
        assert first.isfinite().all() and first.any(), f"{kind}: {key} not written"
        assert torch.equal(first, last), f"{kind}: {key} differs past 2^31"
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
assert peak < 1.5, f"{peak:.1f} GiB resident"
"""


@pytest.mark.parametrize("name", ["branch_sandwich", "looping_update"])
def test_offsets_past_two_to_the_31(name):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr[-2000:]}"
