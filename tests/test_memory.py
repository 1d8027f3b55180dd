"""Counted memory: what a storage is, and that segments do not grow with the loops."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from deeploop import backprop
from deeploop.lm import LoopLM
from deeploop.memory import Live, step_peak
from deeploop.presets import preset


def test_storages_count_once_and_until_they_are_freed():
    with Live() as live:
        a = torch.zeros(1000)
        b = a.view(10, 100)[2:]
        assert live.now == live.peak == 4000
        c = b * 2
        assert live.now == 4000 + 3200
        del a
        assert live.now == 7200  # b still looks at it
        del b, c
        assert live.now == 0 and live.peak == 7200


def test_fake_tensors_count_as_real_ones():
    def run():
        x = torch.zeros(64, 32, requires_grad=True)
        w = torch.zeros(32, 128, requires_grad=True)
        (x @ w).relu().sum().backward()

    with Live() as real:
        run()
    with FakeTensorMode(), Live() as fake:
        run()
    assert real.peak == fake.peak > 64 * 128 * 4


def tiny(loops, plan, **train):
    """loom-tiny at 8 x 64 bytes."""
    config = preset("loom-tiny").replace("model", vocab_size=256, loops=loops, seq_len=64)
    return config.replace("train", plan=plan, batch_size=8, precision="fp32", **train)


def peak(config) -> int:
    """Peak bytes of one batch's segments with weights and gradients, in real memory."""
    torch.manual_seed(0)
    x = torch.randint(0, 256, (8, 64))
    with Live() as live:
        model = LoopLM(config.model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        carried = None
        for segment in backprop.segments(config.train, config.model.loops):
            carried = backprop.backward(model, config, segment, x, x, carried, None).carried
    return live.peak


def test_segments_do_not_grow_with_the_loops():
    """Real tensors: H = 3 to 12 within 10%, and at 12 at most 0.40 of full backprop."""
    peaks = [peak(tiny(h, "segments")) for h in (3, 6, 9, 12)]
    assert max(peaks) < 1.1 * min(peaks)
    assert peaks[-1] < 0.4 * peak(tiny(12, "full"))


def test_recomputing_holds_less():
    kept, by_visit, by_loop = (
        peak(tiny(6, "full", recompute=r)) for r in ("none", "visit", "loop")
    )
    assert by_visit < 0.6 * kept and by_loop < 0.6 * kept


def test_a_329m_loom_in_segments_fits_where_full_backprop_does_not():
    """Fake tensors, 16 x 1024 tokens, weights and moments included.

    Two layers of its ten, to be quick: `python -m bench.memory` counts them all.
    """
    base = preset("loom-329m").replace("train", precision="bf16").replace("model", n_layers=2)
    peaks = {h: step_peak(base.replace("model", loops=h)) for h in (3, 6)}
    assert peaks[6] == pytest.approx(peaks[3], rel=0.1)
    full = step_peak(base.replace("model", loops=12).replace("train", plan="full"))
    assert peaks[6] < 0.4 * full
