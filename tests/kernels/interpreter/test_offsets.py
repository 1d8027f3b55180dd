"""Offsets past 2^31, on a buffer whose pages exist only where they are touched.

A kernel with 32-bit offsets would crash the process, so each test forks one. The chunked
kernels are not here: their row counter is a Python integer under the interpreter and cannot
overflow. tests/kernels/test_offsets.py checks theirs in the compiled IR.
"""

import multiprocessing
import resource

import numpy as np
import pytest
import torch

from tests.helpers.kernel_modules import combine_kernels, launches_of

WRITTEN = {
    "forward": ("h_new_ptr", "local_new_ptr", "glob_new_ptr", "n_ptr"),
    "backward": ("dh_ptr", "df_ptr", "dlocal_ptr", "dglob_ptr"),
}


def in_a_fork(check, *arguments):
    process = multiprocessing.get_context("fork").Process(target=check, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0, f"exit code {process.exitcode}; see the output"


def untouched(*shape):
    """Zeros whose pages the system hands out where they are touched."""
    return torch.from_numpy(np.zeros(shape, dtype=np.float16))


def check_rows(op):
    """Every row holds the same values, so the last one must come out like the first."""
    d, block, n_rows = 2**30 + 256, 64, 3  # row 2 starts past 2^31
    for kind, launch in launches_of(op, torch.zeros(n_rows, block), None).items():
        buffer = untouched(n_rows * d + 16 * block)
        args, views = dict(launch.args), {}
        for key, value in args.items():
            if not isinstance(value, torch.Tensor):
                continue
            if key.startswith("dw_"):  # a sum over the rows
                args[key] = None
                continue
            if value.dim() == 1:
                args[key] = torch.ones(n_rows)
                continue
            view = buffer[len(views) * block :][: n_rows * d].view(n_rows, d)
            view[:, :block] = torch.randn(1, block)
            args[key] = views[key] = view
        written = [key for key in WRITTEN[kind.split()[-1]] if key in views]
        for key in written:
            views[key][:, :block] = float("nan")
        args |= {"D": d, "BLOCK": block, "ROWS": 1}
        launch._replace(args=args, grid=n_rows).run(buffer)
        assert len(written) >= 2
        for key in written:
            first, last = views[key][0, :block], views[key][2, :block]
            assert first.isfinite().all() and first.any(), f"{kind}: {key} was not written"
            assert torch.equal(first, last), f"{kind}: {key} differs past 2^31"
    check_memory()


def check_memory():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    assert peak < 1.5, f"{peak:.1f} GiB resident"


@pytest.mark.parametrize("op", ["post_sandwich", "pre_norm", "branch_sandwich", "looping_update"])
def test_offsets_past_two_to_the_31(op):
    in_a_fork(check_rows, op)


def check_combine():
    d, n_rows = 64, 2**25 + 8  # the last rows start past 2^31
    close = {"rtol": 2e-3, "atol": 2e-3}
    routed = untouched(n_rows, d)
    slots = torch.tensor([[n_rows - 1, 3], [n_rows - 3, -1]], dtype=torch.int32)
    routed[slots[slots >= 0].long()] = torch.randn(3, d).half()
    h, weights = torch.randn(2, d).half(), torch.tensor([[0.5, 2.0], [1.0, 1.0]])
    inputs = (routed, slots, weights, None, None, None)
    (h_new, _, r1, _), launch = combine_kernels.forward_launch(h, *inputs, 1.0, 1e-6, False)
    launch.run(h)
    y = torch.stack([0.5 * routed[-1].double() + 2 * routed[3].double(), routed[-3].double()])
    z = y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(h_new.double(), h.double() + z, **close)
    needs = [False, True, True, False, False, False]
    arguments = (h, None, *inputs, None, r1, None, 1.0, h.dtype, needs)
    (_, drouted, dweights, *_), launches = combine_kernels.backward_launches(*arguments)
    launches[0].run(h)  # the others write zeros to all rows
    g = h.double()
    dy = (g - z * (g * z).mean(1, keepdim=True)) / (y.square().mean(1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(drouted[-1].double(), 0.5 * dy[0], **close)
    torch.testing.assert_close(drouted[-3].double(), dy[1], **close)
    torch.testing.assert_close(drouted[3].double(), 2 * dy[0], **close)
    expected = (dy[1] * routed[-3].double()).sum()
    torch.testing.assert_close(dweights[0, 1, 0].double(), expected, **close)
    check_memory()


def test_combine_offsets_past_two_to_the_31():
    in_a_fork(check_combine)
