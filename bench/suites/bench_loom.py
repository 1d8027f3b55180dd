"""A training step of LOOM by backprop and loops: its time and its peak memory.

    pytest bench/suites/bench_loom.py -s [--benchmark-json=FILE]

`loom-tiny` on a CPU, `loom-329m` in micro-batches of 16 x 1024 tokens on CUDA. For each number
of loops H, the settings of backprop take turns on one model, each with the trainer's step: an
optimizer step after each segment, as in the preset, and the biases of the routers moved.

* full: one backward through all loops; with `visit` or `loop`, activations are recomputed;
* segments(K): a loss, a backward and an optimizer step every K loops, for K under H;
* last(k): gradients through the last k loops alone.

The baselines are the three settings that go through all loops. Before anything is timed, the
loss of each setting must be finite; one that runs out of memory is left out, with its reason.
Peak memory includes weights, moments, gradients and activations, and is measured in a step that
is not timed: on CUDA by the allocator, on a CPU counted from the tensors. FLOPs are the model's,
without recomputation.
"""

import pytest
import torch

from bench.harness.record import one_line
from bench.harness.timing import in_words
from bench.harness.training import Training, take_step, training
from deeploop.config import Config
from deeploop.config.presets import preset
from deeploop.utils.device import computes_in_bf16, pick_device

DEVICE = pick_device("auto")
CUDA = DEVICE.type == "cuda"
LOOPS = (3, 12, 6)  # the ends first, should the time run out
FUSED = ("linear_update_forward", "expert_combine_forward", "sigmoid_router_forward")
FULL = {
    "full": {"backprop": "full"},
    "full, visit": {"backprop": "full", "recompute": "visit"},
    "full, loop": {"backprop": "full", "recompute": "loop"},
}


def sized(loops: int) -> Config:
    if CUDA:
        config = preset("loom-329m").replace("model", loops=loops)
        return config.replace("train", batch_size=16, precision="bf16")
    config = preset("loom-tiny").replace("model", vocab_size=256, loops=loops)
    precision = "bf16" if computes_in_bf16(DEVICE) else "fp32"
    return config.replace("train", batch_size=8, precision=precision)


def settings(loops: int) -> dict[str, dict[str, object]]:
    """Return the settings of backprop by name, each as fields of TrainConfig."""
    shorter = {
        f"{backprop}({k})": {"backprop": backprop, "backprop_loops": k}
        for backprop, sizes in (("segments", (1, 2, 3, 4, 6)), ("last", (1, 3)))
        for k in sizes
        if k < loops
    }
    return FULL | shorter


def contenders(t: Training, missing: dict[str, str]) -> dict[str, Training]:
    """Take a step with each setting, all on one model; returns those that fit into memory."""
    result = {}
    for name, fields in settings(t.config.model.loops).items():
        run = t._replace(config=t.config.replace("train", **fields))
        try:
            loss = take_step(run)
        except torch.OutOfMemoryError as error:
            t.optimizer.zero_grad(set_to_none=True)
            missing[name] = in_words(error)
        else:
            assert torch.isfinite(loss), f"{name}: loss {loss.item()}"
            result[name] = run
    return result


@pytest.mark.parametrize("loops", LOOPS)
def test_backprop(benchmark, machine, loops):
    t, missing = training(sized(loops), DEVICE), {}
    running = contenders(t, missing)
    calls = {name: lambda run=run: take_step(run) for name, run in running.items()}
    existing = t.tensors()
    entries = machine.compare(
        calls, {name: existing for name in calls}, rounds=3, fused={name: FUSED for name in calls}
    )
    for entry in entries.values():
        entry["peak_bytes"] += t.nbytes()
    work = {name: run.work() for name, run in running.items()}
    case = {"model": t.config.preset, "loops": loops, "batch": len(t.tokens)}
    benchmark.extra_info |= machine.record(
        "loom", case, t.dtype, work, entries, FULL, missing, ours=entries
    )
    print(f"\n{one_line(benchmark.extra_info)}")
    benchmark.pedantic(next(iter(calls.values())), rounds=1)  # full, if it fits
