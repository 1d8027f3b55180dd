"""Offsets past 2^31, on a buffer whose pages exist only where they are touched.

A kernel with 32-bit offsets would crash the process, so each runs in its own.
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
D, SLOT, BLOCK, ROWS = 2**30 + 256, 256, 64, 3  # row 2 starts past 2^31
buffer = torch.from_numpy(np.zeros(ROWS * D + 8 * SLOT, dtype=np.float16))
slots = iter(range(8))
take = lambda: buffer[next(slots) * SLOT :][: ROWS * D].view(ROWS, D)
h, f, a, b, c, d = (take() for _ in range(6))
for x in (h, f, a, b):
    x[:, :BLOCK] = torch.randn(ROWS, BLOCK)
x = torch.zeros(ROWS, BLOCK)
part = lambda *xs: [y[:, :BLOCK].double() for y in xs]
scale = lambda z: (z.square().sum(-1, keepdim=True) / D + 1e-12).rsqrt()


def launch(kind, **tensors):
    found = module.aot_launches(x, None)[f"{name} {kind}"]
    args = found.args | tensors | {"D": D, "ROWS": 1, "BLOCK": BLOCK, "eps": 1e-12}
    args = {k: v for k, v in args.items() if k in found.kernel.arg_names}
    found._replace(args=args, grid=ROWS).run(x)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


one = torch.ones(ROWS)
if name == "pre_norm":
    launch("forward", h_ptr=h, f_ptr=f, h_new_ptr=c, n_ptr=d, r_ptr=one)
    z = sum(part(h, f))
    close(part(c)[0], z)
    close(one[:, None].double(), scale(z))
    launch("backward", dh_new_ptr=a, dn_ptr=None, h_new_ptr=h, r_ptr=one, dh_ptr=c,
           df_ptr=d, dw_next_ptr=None)
    close(part(c)[0], part(a)[0])
else:
    r2 = torch.ones(ROWS)
    launch("forward", h_ptr=h, f_ptr=f, h_new_ptr=c, n_ptr=d, r1_ptr=one, r2_ptr=r2)
    z = sum(part(h, f))
    close(part(c)[0], z * scale(z))
    one.fill_(1.0)
    launch("backward", dh_new_ptr=a, dn_ptr=None, h_ptr=h, f_ptr=f, r1_ptr=one, r2_ptr=r2,
           dh_ptr=c, df_ptr=d, dw_out_ptr=None, dw_next_ptr=None)
    z, dz = sum(part(h, f)), part(a)[0]
    close(part(d)[0], dz - z * (dz * z).sum(-1, keepdim=True) / D)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
assert peak < 1.5, f"{peak:.1f} GiB resident"
"""


@pytest.mark.parametrize("name", ["post_sandwich", "pre_norm"])
def test_offsets_past_two_to_the_31(name):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, f"exit {result.returncode}: {result.stderr[-2000:]}"
