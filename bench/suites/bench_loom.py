"""A training step of LOOM by backprop plan and loops: its time and its peak memory.

    pytest bench/suites/bench_loom.py -s [--benchmark-json=FILE]

`loom-tiny` on a CPU, `loom-329m` in micro-batches of 16 x 1024 tokens on CUDA. The plans of
one number of loops H take turns on one model through the trainer's own path: a step of the
optimizer for each segment, as the preset has it, and the biases of the experts moved.

* full: one backward through all loops; with `visit` or `loop`, run again in backward;
* segments(K): a loss, a backward and a step every K loops, for K under H;
* last(k): gradients through the last k loops alone.

The baselines are the ways through all loops: the plain one and the two that run again.
Before anything is timed, each plan's loss must be finite; one that has no room is named.
Peak memory has weights, moments, gradients and activations, and is taken in a step that is
not timed: on CUDA from the allocator, on a CPU counted from the tensors. FLOPs are the
model's, without what runs again.
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
    "full": {"plan": "full"},
    "full, visit": {"plan": "full", "recompute": "visit"},
    "full, loop": {"plan": "full", "recompute": "loop"},
}


def sized(loops: int) -> Config:
    if CUDA:
        config = preset("loom-329m").replace("model", loops=loops)
        return config.replace("train", batch_size=16, precision="bf16")
    config = preset("loom-tiny").replace("model", vocab_size=256, loops=loops)
    precision = "bf16" if computes_in_bf16(DEVICE) else "fp32"
    return config.replace("train", batch_size=8, precision=precision)


def plans(loops: int) -> dict[str, dict[str, object]]:
    """Fields of TrainConfig, by name."""
    cut = {
        f"{plan}({k})": {"plan": plan, "backprop_loops": k}
        for plan, sizes in (("segments", (1, 2, 3, 4, 6)), ("last", (1, 3)))
        for k in sizes
        if k < loops
    }
    return FULL | cut


def runs(there: Training, missing: dict[str, str]) -> dict[str, Training]:
    """The plans that fit here, all on the same model; why not, for the others, in `missing`."""
    found = {}
    for name, fields in plans(there.config.model.loops).items():
        run = there._replace(config=there.config.replace("train", **fields))
        try:
            loss = take_step(run)
        except torch.OutOfMemoryError as error:
            there.optimizer.zero_grad(set_to_none=True)
            missing[name] = in_words(error)
        else:
            assert torch.isfinite(loss), f"{name}: loss {loss.item()}"
            found[name] = run
    return found


@pytest.mark.parametrize("loops", LOOPS)
def test_plans(benchmark, machine, loops):
    there, missing = training(sized(loops), DEVICE), {}
    found = runs(there, missing)
    calls = {name: lambda run=run: take_step(run) for name, run in found.items()}
    held = there.held()
    entries = machine.compare(
        calls, {name: held for name in calls}, rounds=3, fused={name: FUSED for name in calls}
    )
    for entry in entries.values():
        entry["peak_bytes"] += there.held_bytes()
    work = {name: run.work() for name, run in found.items()}
    case = {"model": there.config.preset, "loops": loops, "batch": len(there.tokens)}
    benchmark.extra_info |= machine.record(
        "loom", case, there.dtype, work, entries, FULL, missing, ours=entries
    )
    print(f"\n{one_line(benchmark.extra_info)}")
    benchmark.pedantic(next(iter(calls.values())), rounds=1)  # full, where it fits
