"""The clock: bytes and FLOPs of operators by hand, and of a step against the model's FLOPs."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from deeploop.analyze.plan.hardware import Device
from deeploop.analyze.plan.memory import LiveBytes, step_memory
from deeploop.analyze.plan.planner import resolve
from deeploop.analyze.plan.roofline import MEASURED, Clock
from deeploop.config.backprop import segments
from deeploop.config.presets import preset
from deeploop.kernels import post_sandwich
from deeploop.model.flops import flops_per_token
from deeploop.model.moe import experts

BYTES = Device("a byte takes a second, products nothing", math.inf, math.inf, 1.0, 1.0)
FLOPS = Device("a FLOP takes a second, bytes nothing", 1.0, 1.0, math.inf, 1.0)


def timed(device, run, *shapes, vocab_size=0, dtype=torch.float32) -> dict[str, float]:
    """Seconds of `run` on tensors of these shapes."""
    clock = Clock(device, MEASURED, vocab_size)
    with FakeTensorMode():
        inputs = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        with LiveBytes(clock=clock):
            run(*inputs)
    return dict(clock.seconds)


def test_a_product_reads_its_factors_and_writes_its_result():
    assert timed(BYTES, torch.mm, (8, 16), (16, 32)) == {"GEMM": 4 * (128 + 512 + 256)}
    assert timed(FLOPS, torch.mm, (8, 16), (16, 32)) == {"GEMM": 2 * 8 * 16 * 32}
    in_the_head = timed(BYTES, torch.mm, (8, 16), (16, 32), vocab_size=32)
    assert list(in_the_head) == ["head and loss"]


def test_the_longer_of_products_and_bytes_counts():
    even = Device("", 1.0, 2.0, 1.0, 1.0)
    assert timed(even, torch.mm, (2, 2), (2, 2)) == {"GEMM": 48}  # bytes; 8 s of products
    large = timed(even, torch.mm, (64, 64), (64, 64))
    assert large == {"GEMM": 2 * 64**3 / 2}
    halves = timed(even, torch.mm, (64, 64), (64, 64), dtype=torch.bfloat16)
    assert halves == {"GEMM": 2 * 64**3}


@pytest.mark.parametrize(
    ("run", "passes"),
    [
        (lambda x: x.view(-1).t().detach(), 0),
        (lambda x: torch.empty_like(x), 0),
        (lambda x: x + x[:, :1], 2.125),  # an eighth for one column of eight
        (lambda x: x.mul_(2), 2),
        (lambda x: torch.zeros_like(x), 1),
        (lambda x: x[:1].expand(4, 8).clone(), 1.25),  # reads the row there is
    ],
)
def test_other_operators_read_and_write_once(run, passes):
    assert timed(BYTES, run, (4, 8)).get("elementwise", 0) == pytest.approx(passes * 128, abs=1e-9)


def test_a_lookup_reads_the_rows_it_takes():
    def run(table):
        F.embedding(torch.zeros(5, dtype=torch.int64), table)

    # 5 indices made and read, 5 rows of 4 read and written; not 1000 rows.
    assert sum(timed(BYTES, run, (1000, 4)).values()) < 2 * (5 * 8 + 5 * 16) + 5 * 8 + 1


def test_an_update_moves_its_floor():
    """post_sandwich forward: 4 passes over [rows, d], and two statistics a row."""

    def run(h, f):
        post_sandwich(h, f, None, None, 2.0)

    assert timed(BYTES, run, (64, 512), (64, 512))["updates"] == pytest.approx(
        4 * 64 * 512 * 4, rel=0.01
    )


def test_experts_run_the_products_that_each_row_needs():
    def run(x, gate_up, down):
        token = torch.zeros(30, dtype=torch.int32)
        x.requires_grad_(), gate_up.requires_grad_(), down.requires_grad_()
        ends = torch.zeros(3, dtype=torch.int32)
        experts.grouped_mm(x, gate_up, down, token, token.view(10, 3), ends).sum().backward()

    seconds = timed(FLOPS, run, (10, 16), (3, 24, 16), (3, 16, 12), dtype=torch.float64)
    assert seconds["experts"] == 3 * 30 * 2 * (24 * 16 + 16 * 12)


BACKPROP = [
    {"backprop": "full"},
    {"backprop": "segments", "backprop_loops": 1, "micro_batch": 2},
    {"backprop": "last", "backprop_loops": 2, "micro_batch": 4},
]


@pytest.mark.parametrize("train", BACKPROP, ids=lambda t: t["backprop"])
def test_a_step_runs_the_models_flops(train):
    """And one more of attention's products in backward, which recomputes the scores."""
    config = preset("deeploop-tiny").replace("model", seq_len=320, n_layers=1)
    config = config.replace("train", precision="fp32", batch_size=8, **train)
    config = resolve(config, "cuda")
    clock = Clock(FLOPS, MEASURED, 256)
    step_memory(config, "cuda", clock)
    m, tokens, listed = config.model, 8 * 320, segments(config.train, config.model.loops)
    recomputed = 2 * m.d_model * m.seq_len * sum(len(s.loops) for s in listed)
    assert sum(clock.seconds.values()) == pytest.approx(
        tokens * (flops_per_token(config) + recomputed), rel=1e-9
    )
    assert clock.seconds["head and loss"] == pytest.approx(6 * tokens * 256 * 192 * len(listed))


def test_repeat_multiplies_the_time_of_the_operators_inside():
    once, often = (Clock(BYTES, MEASURED._replace(launch=1.0), 0) for _ in range(2))
    x = torch.zeros(8)
    with LiveBytes(clock=once):
        x + x
    with LiveBytes(clock=often), often.repeat(3, share=0.5, component="optimizer"):
        x + x
    assert often.seconds == {"optimizer": 1.5 * once.seconds["elementwise"]}
    assert (once.host, often.host) == (1, 3)


def test_the_steps_metrics_and_the_routers_biases_take_no_time():
    """Launches are of segments and optimizer steps; moving the biases comes after them."""
    config = preset("loom-tiny").replace("model", loops=1, n_layers=1, vocab_size=256)
    launches = []
    for lr in (0.0, 1e-3):
        clock = Clock(BYTES, MEASURED._replace(launch=1.0), 256)
        step_memory(config.replace("model.moe", balance_lr=lr), "cuda", clock)
        launches.append(clock.host)
    assert launches[0] == launches[1] > 100
