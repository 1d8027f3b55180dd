"""Predict a run before it starts: memory, step time, tokens per second, hours.

One step of the trainer goes through the real model, optimizer and backprop plan with fake
tensors: `memory.LiveBytes` counts the storages that live at once, `roofline.Clock` the seconds
of each operator. Nothing is allocated and no GPU is needed; the operators are those of the CPU,
with CUDA's chunks of the loss. (Up to 256 tokens a sequence, a CPU's attention in bfloat16
keeps its scores and a GPU's does not: memory is then counted too high.)

Of a model with K layers only those with 1 and with 2 are run: bytes and seconds are affine in
the layers, because the operators that only the first or the last layer needs run once in any
model. One step gives the memory for every size of micro-batch (`memory.StepMemory`).

The figures are of one process that holds the whole batch, without the all-reduce between
processes, data and validation. Memory is what the allocator hands out. Time is a prediction;
`roofline.GPU` says which measurements it was fitted to.
"""

import dataclasses
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

import torch

from deeploop.analyze.plan.hardware import DEVICES, Device, this_cpu
from deeploop.analyze.plan.memory import Kind, PeakBytes, few_chunks, step_memory
from deeploop.analyze.plan.roofline import GPU, MEASURED, Clock, Efficiency
from deeploop.config import Config, ModelConfig
from deeploop.config.backprop import differ, segments
from deeploop.model.flops import flops_per_token
from deeploop.model.looplm import LoopLM
from deeploop.utils.device import computes_in_bf16
from deeploop.utils.errors import InputError

VOCABULARIES = {"auto": 256, "byte": 256, "gpt2": 50257}
DRAWS = 20_000
RESERVE = 0.05  # of a GPU's memory: CUDA's context, libraries' workspaces, fragments


class Target(NamedTuple):
    """A device, the share of its peaks that kernels reach, and the kind of its operators."""

    device: Device
    efficiency: Efficiency
    kind: Kind

    @property
    def room(self) -> float:
        """Bytes that a step may take."""
        return self.device.memory * (1 - RESERVE)


class Step(NamedTuple):
    """Predicted cost of one training step."""

    memory: Callable[[int], PeakBytes]  # bytes at the peak, by sequences of a micro-batch
    by_component: dict[str, float]  # the device's seconds
    host: float  # seconds that the host takes to launch the operators


class Estimate(NamedTuple):
    """Predicted cost of one run."""

    config: Config
    target: Target
    parameters: int
    memory: PeakBytes
    by_component: dict[str, float]  # the device's seconds of a step
    host: float  # seconds that the host takes to launch a step's operators
    largest: int  # sequences of the largest micro-batch that fits; 0: not even one

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.batch_size * self.config.model.seq_len

    @property
    def seconds(self) -> float:
        """Seconds of a step: the device's, or the host's where launching takes longer."""
        return max(sum(self.by_component.values()), self.host)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOP/s over the device's peak in the run's precision."""
        d = self.target.device
        peak = d.bf16 if self.config.train.precision == "bf16" else d.fp32
        return self.rate * flops_per_token(self.config) / peak

    @property
    def hours(self) -> float:
        """Hours of the whole run on one device."""
        return self.config.train.steps * self.seconds / 3600

    @property
    def fits(self) -> bool:
        """Whether the peak memory fits on the device."""
        return self.memory.peak <= self.target.room


def target_of(name: str) -> Target:
    """Look a device up by name; "cpu" measures this machine, in about a second."""
    if name == "cpu":
        return Target(this_cpu(), MEASURED, "cpu")
    if name not in DEVICES:
        raise InputError(f"device={name!r}: must be one of {', '.join(DEVICES)} or cpu")
    return Target(DEVICES[name], GPU, "cuda")


def resolve(config: Config, kind: Kind) -> Config:
    """Fill in the vocabulary and the precision, which a run takes from corpus and machine."""
    config.model.require_loops("plan")
    vocab = config.model.vocab_size or VOCABULARIES.get(config.data.tokenizer, 0)
    if not vocab:
        raise InputError(
            f"model.vocab_size=0: data.tokenizer={config.data.tokenizer!r} is not read for a plan; "
            "give the number of its tokens"
        )
    if config.model.moe.experts and config.model.moe.backend != "grouped_mm":
        raise InputError(
            f"model.moe.backend={config.model.moe.backend!r}: only grouped_mm can be planned; the "
            "shapes of the others depend on the routing"
        )
    config = config.replace("model", vocab_size=vocab)
    if config.train.precision != "auto":
        return config
    bf16 = kind == "cuda" or computes_in_bf16(torch.device("cpu"))
    return config.replace("train", precision="bf16" if bf16 else "fp32")


def count(config: Config, target: Target, timed: bool = True) -> Step:
    """Predict a step of a resolved configuration, from models of one layer and of two.

    Args:
        config: from `resolve`.
        target: the device.
        timed: also predict seconds, which takes longer.
    """
    layers = config.model.n_layers
    if layers <= 2:
        return count_whole(config, target, timed)
    one, two = (count_whole(config.replace("model", n_layers=n), target, timed) for n in (1, 2))

    def extrapolate(a: float, b: float) -> float:
        return a + (layers - 1) * (b - a)

    def memory(sequences: int) -> PeakBytes:
        return PeakBytes(*map(extrapolate, one.memory(sequences), two.memory(sequences)))

    by_component = {
        name: extrapolate(seconds, two.by_component[name])
        for name, seconds in one.by_component.items()
    }
    return Step(memory, by_component, extrapolate(one.host, two.host))


def count_whole(config: Config, target: Target, timed: bool = True) -> Step:
    """Predict a step by running all of its layers.

    Where loops are drawn, seconds are those of a step of typical cost, and bytes those of the
    costliest of the run's steps.
    """
    clock = Clock(target.device, target.efficiency, config.model.vocab_size)
    typical, costliest = steps_of_interest(config)
    counted = step_memory(config, target.kind, clock if timed else None, step=typical)
    if costliest != typical:
        counted = step_memory(config, target.kind, step=costliest)
    memory = counted.at
    if few_chunks(config, target.kind):
        size = config.train.micro_batch or config.train.batch_size
        exact = step_memory(config, target.kind, exact=True, step=costliest).at(size)

        def memory(sequences: int) -> PeakBytes:
            return exact if sequences == size else counted.at(sequences)

    return Step(memory, dict(clock.seconds), clock.host)


def steps_of_interest(config: Config) -> tuple[int, int]:
    """Return a step whose number of loops is typical, and the run's step with the most.

    Of a long run the first steps are searched, as many as draw 20,000 numbers of loops. The loops
    are those with gradient, and where these are equal all loops.
    """
    t, loops = config.train, config.model.loops
    drawn = t.batch_size if t.loop_count_per == "sequence" else 1
    steps = max(1, min(t.steps, DRAWS // drawn)) if differ(t) else 1

    def size(step: int) -> tuple[int, int]:
        listed = segments(t, loops, step)
        return sum(len(s.loops) for s in listed), sum(s.loops.stop for s in listed)

    sizes = [size(step) for step in range(steps)]
    mean = tuple(sum(column) / len(sizes) for column in zip(*sizes, strict=True))
    typical = min(sizes, key=lambda s: (abs(s[0] - mean[0]), abs(s[1] - mean[1])))
    return sizes.index(typical), sizes.index(max(sizes))


def largest(config: Config, target: Target, step: Step) -> int:
    """Return the sequences of the largest micro-batch that fits: 0 to the batch size."""
    t = config.train
    if t.micro_batch in (0, t.batch_size):
        if step.memory(t.batch_size).peak <= target.room:
            return t.batch_size
        config = config.replace("train", micro_batch=max(1, t.batch_size // 2))
        step = count(config, target, timed=False)  # gradients exist from one to the next
    sizes = range(1, t.batch_size + 1)
    return bisect_right(sizes, target.room, key=lambda sequences: step.memory(sequences).peak)


def estimate(config: Config, target: Target) -> Estimate:
    """Predict one run; raises InputError for what cannot be planned."""
    config = resolve(config, target.kind)
    step = count(config, target)
    sequences = config.train.micro_batch or config.train.batch_size
    return Estimate(
        config,
        target,
        count_parameters(config.model),
        step.memory(sequences),
        step.by_component,
        step.host,
        largest(config, target, step),
    )


def count_parameters(m: ModelConfig) -> int:
    """Count a model's parameters from models of one layer and of two."""
    with torch.device("meta"):
        models = [LoopLM(dataclasses.replace(m, n_layers=n)) for n in (1, 2)]
    one, two = (sum(p.numel() for p in model.parameters()) for model in models)
    return one + (m.n_layers - 1) * (two - one)


def against_full(e: Estimate) -> float:
    """Return peak memory under the run's backprop plan, over that of full backprop."""
    t = e.config.train
    full = count(e.config.replace("train", backprop="full"), e.target, timed=False)
    return e.memory.peak / full.memory(t.micro_batch or t.batch_size).peak
