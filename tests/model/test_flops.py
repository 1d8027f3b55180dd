"""FLOPs against the papers' table and against what torch counts; devices by name."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from deeploop.analyze.plan.hardware import device_of
from deeploop.config import Config, ModelConfig, MorConfig
from deeploop.config.backprop import segments
from deeploop.config.presets import preset
from deeploop.model.flops import flops_per_token
from deeploop.model.looplm import LoopLM
from deeploop.train.backprop import MicroBatch, run_segment


@pytest.mark.parametrize(
    ("size", "loops", "giga"),
    [("small", 1, 0.85), ("small", 7, 4.59), ("medium", 1, 2.42), ("medium", 7, 15.1)],
)
def test_gpt2_costs_what_6_v_d_and_12_d_squared_a_block_say(size, loops, giga):
    # 12 d^2 a block: SwiGLU 8/3 d wide; medium's is rounded up to 2752.
    found = flops_per_token(preset(f"gpt2-{size}-r{loops}-deeploop")) / 1e9
    assert found == pytest.approx(giga, rel=0.01)


PLANS = [
    {"backprop": "full"},
    {"backprop": "segments", "backprop_loops": 2},
    {"backprop": "last", "backprop_loops": 1},
]


@pytest.mark.parametrize(
    "unlooped", [{}, {"prelude": 2, "coda": 1, "readout_map": True}], ids=["loops", "all"]
)
@pytest.mark.parametrize("residual", ["deeploop", "loom"])
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p["backprop"])
def test_a_dense_step_runs_the_flops_that_torch_counts(plan, residual, unlooped):
    model = ModelConfig(
        residual=residual, d_model=64, n_heads=2, loops=3, seq_len=32, vocab_size=96, **unlooped
    )
    config = Config(model=model).replace("train", precision="bf16", batch_size=2, **plan)
    lm = LoopLM(config.model)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        state = None
        for segment in segments(config.train, 3):
            state = run_segment(lm, config, segment, MicroBatch(tokens, tokens), state).state
    # In bfloat16 a CPU's attention is two plain products, which torch counts.
    assert counter.get_total_flops() / tokens.numel() == flops_per_token(config)


def test_devices_go_by_the_name_that_cuda_gives():
    assert device_of("NVIDIA H200").bandwidth == 4.8e12
    assert device_of("x86_64 CPU, 2 threads") is None


@pytest.mark.parametrize("kv", ["selected", "first"])
def test_loops_of_some_tokens_run_the_flops_that_torch_counts(kv):
    model = ModelConfig(
        residual="pre_norm", depth="expert_choice", d_model=64, n_heads=2, loops=3, seq_len=32,
        vocab_size=96, inject="adapter", coda=1, mor=MorConfig(capacity="1,.5,.25", kv=kv),
    )  # fmt: skip
    config = Config(model=model).replace("train", precision="bf16", batch_size=2)
    lm = LoopLM(config.model)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    (segment,) = segments(config.train, 3)
    with FlopCounterMode(display=False) as counter:
        run_segment(lm, config, segment, MicroBatch(tokens, tokens))
    counted = counter.get_total_flops() / tokens.numel()
    routers = 3 * 2 * 64 * 3
    # Of attention under a mask, a kernel of its own, torch counts nothing on a CPU.
    masked = 3 * (0.5 + 0.25) * 2 * 4 * 64 * 32 if kv == "first" else 0
    assert counted - routers + masked == flops_per_token(config)
