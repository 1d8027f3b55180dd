"""What a run would take, before it runs: memory, time, tokens per second, hours.

    deeploop plan gpt2-small-r7-deeploop --device h200 --train.compile

One step goes through the real model, optimizer and plan with fake tensors: `memory.Live`
counts the storages that live at once, `roofline.Clock` the seconds of each operator.
Nothing is allocated and no GPU is needed; operators are those of the CPU, with CUDA's
chunks of the loss. (Up to 256 tokens a sequence a CPU's attention in bfloat16 keeps its
scores, which a GPU's does not: there memory is counted too high.)

Of K layers only the models of 1 and of 2 run: bytes and seconds are affine in the layers,
since what is special about the first and the last touches sublayers of their own. Memory
at every size of micro-batch comes out of the same step (`memory.Live`).

Figures are of one process that holds the whole batch: the all-reduce of several, data and
validation are left out. Memory is what the allocator hands out, time a prediction: what
it was fitted to stands at `roofline.GPU`.
"""

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from deeploop.analyze.plan.hardware import DEVICES, Device, this_cpu
from deeploop.analyze.plan.memory import Kind, PeakBytes, few_chunks, step_memory
from deeploop.analyze.plan.roofline import GPU, MEASURED, Clock, Efficiency
from deeploop.config import Config, ModelConfig
from deeploop.config.presets import presets
from deeploop.model.flops import flops_per_token, weight_flops
from deeploop.model.looplm import LoopLM
from deeploop.utils.device import computes_in_bf16
from deeploop.utils.errors import InputError

GIB = 2**30
VOCABULARIES = {"byte": 256, "gpt2": 50257}
RESERVE = 0.05  # of a GPU's memory: CUDA's context, libraries' workspaces, fragments

# The 16 runs of DeepLoop (arXiv 2607.13491): H200-hours as reported, and the MFU that its
# sister paper's rates come to when FLOPs are 6 a token and weight, attention left out.
PAPER_HOURS, PAPER_MFU = 3700, 0.29
LOOM_GIB = {"segments": 12.6, "full": 19.3}  # arXiv 2610.01153, 329M at 12 loops, on an NPU


class Target(NamedTuple):
    """What a run would run on."""

    device: Device
    efficiency: Efficiency
    kind: Kind

    @property
    def room(self) -> float:
        """Bytes a step may take."""
        return self.device.memory * (1 - RESERVE)


class Step(NamedTuple):
    """A step: bytes at its peak, seconds by part, and seconds that the host takes to launch."""

    memory: Callable[[int], PeakBytes]  # by sequences of a micro-batch
    parts: dict[str, float]
    host: float


class Estimate(NamedTuple):
    """What `plan` says of one configuration."""

    config: Config
    target: Target
    parameters: int
    memory: PeakBytes
    parts: dict[str, float]  # the device's seconds of a step
    host: float  # the seconds that it takes to launch
    largest: int  # sequences of a micro-batch; 0: not even one fits

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.config.train.batch_size * self.config.model.seq_len

    @property
    def seconds(self) -> float:
        """Of a step: the device's, or the host's where it cannot keep ahead."""
        return max(sum(self.parts.values()), self.host)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs over the device's peak in the run's precision."""
        d = self.target.device
        peak = d.bf16 if self.config.train.precision == "bf16" else d.fp32
        return self.rate * flops_per_token(self.config) / peak

    @property
    def hours(self) -> float:
        """Of the whole run on one device."""
        return self.config.train.steps * self.seconds / 3600

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.target.room


def target_of(name: str) -> Target:
    """A device by name; for "cpu" this machine's, measured in about a second."""
    if name == "cpu":
        return Target(this_cpu(), MEASURED, "cpu")
    if name not in DEVICES:
        raise InputError(f"device={name!r}: must be one of {', '.join(DEVICES)} or cpu")
    return Target(DEVICES[name], GPU, "cuda")


def resolve(config: Config, kind: Kind) -> Config:
    """Fill in what a run would take from the machine and the corpus."""
    vocab = config.model.vocab_size or VOCABULARIES.get(config.data.tokenizer, 0)
    if not vocab:
        raise InputError(
            f"model.vocab_size=0: data.tokenizer={config.data.tokenizer!r} is not read for a plan; "
            "give the number of its tokens"
        )
    if config.model.moe.experts and config.model.moe.backend != "grouped_mm":
        raise InputError(
            f"model.moe.backend={config.model.moe.backend!r}: only grouped_mm can be planned, the "
            "shapes of others are known as they run"
        )
    config = config.replace("model", vocab_size=vocab)
    if config.train.precision != "auto":
        return config
    bf16 = kind == "cuda" or computes_in_bf16(torch.device("cpu"))
    return config.replace("train", precision="bf16" if bf16 else "fp32")


def count(config: Config, target: Target, timed: bool = True) -> Step:
    """A step of a resolved configuration, from the models of one layer and of two."""
    layers = config.model.n_layers
    if layers <= 2:
        return count_whole(config, target, timed)
    one, two = (count_whole(config.replace("model", n_layers=n), target, timed) for n in (1, 2))

    def further(a: float, b: float) -> float:
        return a + (layers - 1) * (b - a)

    def memory(sequences: int) -> PeakBytes:
        return PeakBytes(*map(further, one.memory(sequences), two.memory(sequences)))

    parts = {part: further(one.parts[part], two.parts[part]) for part in one.parts}
    return Step(memory, parts, further(one.host, two.host))


def counted_peak(config: Config, rows: int) -> float:
    """Bytes that a CPU's step holds at its peak, with micro-batches of so many sequences."""
    target = Target(DEVICES["h200"], MEASURED, "cpu")  # whose seconds nobody reads
    return count(config, target, timed=False).memory(rows).peak


def count_whole(config: Config, target: Target, timed: bool = True) -> Step:
    """A step, every layer of it run."""
    clock = Clock(target.device, target.efficiency, config.model.vocab_size)
    counted = step_memory(config, target.kind, clock if timed else None)
    memory = counted.at
    if few_chunks(config, target.kind):
        own = config.train.micro_batch or config.train.batch_size
        at_own = step_memory(config, target.kind, exact=True).at(own)

        def memory(sequences: int) -> PeakBytes:
            return at_own if sequences == own else counted.at(sequences)

    return Step(memory, dict(clock.seconds), clock.host)


def largest(config: Config, target: Target, step: Step) -> int:
    """Sequences of the largest micro-batch whose step fits; at most the batch, 0 for none."""
    t = config.train
    if t.micro_batch in (0, t.batch_size):
        if step.memory(t.batch_size).peak <= target.room:
            return t.batch_size
        config = config.replace("train", micro_batch=max(1, t.batch_size // 2))
        step = count(config, target, timed=False)  # its gradients pile up
    sizes = range(1, t.batch_size + 1)
    return bisect_right(sizes, target.room, key=lambda sequences: step.memory(sequences).peak)


def estimate(config: Config, target: Target) -> Estimate:
    """Predict one run; raises InputError for what cannot be planned."""
    config = resolve(config, target.kind)
    step = count(config, target)
    rows = config.train.micro_batch or config.train.batch_size
    most = largest(config, target, step)
    parameters = count_parameters(config.model)
    return Estimate(config, target, parameters, step.memory(rows), step.parts, step.host, most)


def count_parameters(m: ModelConfig) -> int:
    """Of a model, from those of one layer and of two."""
    with torch.device("meta"):
        models = [LoopLM(dataclasses.replace(m, n_layers=n)) for n in (1, 2)]
    one, two = (sum(p.numel() for p in model.parameters()) for model in models)
    return one + (m.n_layers - 1) * (two - one)


def against_full(e: Estimate) -> float:
    """Peak memory under the run's plan over that of full backprop."""
    t = e.config.train
    full = count(e.config.replace("train", backprop="full"), e.target, timed=False)
    return e.memory.peak / full.memory(t.micro_batch or t.batch_size).peak


# ---------------------------------------------------------------------------
# What is said


def as_json(e: Estimate) -> dict[str, Any]:
    """An estimate in bytes, seconds and tokens."""
    return {
        "preset": e.config.preset,
        "device": e.target.device.title,
        "parameters": e.parameters,
        "tokens_per_step": e.tokens,
        "flops_per_token": flops_per_token(e.config),
        "memory": e.memory._asdict() | {"peak": e.memory.peak, "room": e.target.room},
        "largest_micro_batch": e.largest,
        "seconds": e.parts | {"host": e.host, "step": e.seconds},
        "tokens_per_second": e.rate,
        "mfu": e.mfu,
        "run_hours": e.hours,
    }


def in_bytes(n: float) -> str:
    """GiB, below one MiB or KiB."""
    if n >= GIB:
        return f"{n / GIB:,.2f} GiB"
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.0f} KiB"


def in_time(seconds: float) -> str:
    """Hours, below one minutes or seconds."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} seconds"


def in_tokens(n: int) -> str:
    """Billions, below one millions."""
    return f"{n / 1e9:,.2f} B tokens" if n >= 1e9 else f"{n / 1e6:.3g} million tokens"


def in_flops(n: float) -> str:
    """GFLOP, below one MFLOP."""
    return f"{n / 1e9:,.2f} GFLOP" if n >= 1e9 else f"{n / 1e6:.3g} MFLOP"


def describe(e: Estimate) -> list[str]:
    """One estimate in lines."""
    t, m, held, device = e.config.train, e.config.model, e.memory, e.target.device
    rows = t.micro_batch or t.batch_size
    plan = t.backprop if t.backprop == "full" else f"{t.backprop}, {t.backprop_loops} loops"
    again = "" if t.recompute == "none" else f", each {t.recompute} run again"
    split = " + ".join(f"{name} {in_bytes(b)}" for name, b in held._asdict().items())
    verdict = "fits" if held.peak <= e.target.room else "does not fit"
    parts = sorted(e.parts.items(), key=lambda part: -part[1])
    device_seconds = sum(e.parts.values())
    lines = [
        f"predicted for {device.title}; nothing was run",
        f"model    {e.config.preset}: {e.parameters:,} parameters, "
        f"{in_flops(flops_per_token(e.config))} a token",
        f"step     {e.tokens:,} tokens: {t.batch_size} x {m.seq_len}, micro-batches of {rows}, "
        f"{t.precision}{', compiled' if t.compile else ''}; plan {plan}{again}",
        f"memory   {in_bytes(held.peak)} = {split}",
        f"         {verdict} in {e.target.room / GIB:.1f} GiB; largest micro-batch: {e.largest}",
        f"time     {f'{e.seconds:.4g} s' if e.seconds >= 1 else f'{1e3 * e.seconds:.4g} ms'} a step"
        + (", bound by the host's launches" if e.host > device_seconds else ""),
        *(f"         {100 * s / device_seconds:5.1f}%  {part}" for part, s in parts),
        f"speed    {e.rate:,.0f} tokens/s, MFU {100 * e.mfu:.1f}%",
        f"run      {in_tokens(t.steps * e.tokens)}: {in_time(3600 * e.hours)} on one device",
    ]
    if t.backprop != "full":
        lines.append(
            f"plan     {against_full(e):.2f} of the memory of full backprop{loom_paper(e)}"
        )
    return lines


def loom_paper(e: Estimate) -> str:
    """What LOOM's paper reports, beside its own case."""
    m, t = e.config.model, e.config.train
    if not e.config.preset.startswith("loom-329m") or (m.loops, t.backprop) != (12, "segments"):
        return ""
    segments, full = LOOM_GIB.values()
    return f" (paper: {segments} of {full} GiB, {segments / full:.2f}, on an NPU)"


HEAD = (
    f"{'preset':40} {'parameters':>13} {'memory':>13} {'micro':>5} {'largest':>7} {'tokens/s':>9} "
    f"{'MFU':>5} {'run':>14}"
)


def row(e: Estimate) -> str:
    """One estimate in one line, under HEAD."""
    t = e.config.train
    return (
        f"{e.config.preset:40} {e.parameters:13,} {in_bytes(e.memory.peak):>13} "
        f"{t.micro_batch or t.batch_size:5} {e.largest:7} {e.rate:9,.0f} {100 * e.mfu:4.1f}% "
        f"{in_time(3600 * e.hours):>14}"
    )


def matrix() -> list[Config]:
    """The 16 runs of DeepLoop: two sizes, R of 1, 3, 5 and 7, two residuals."""
    return [config for name, config in presets().items() if name.startswith("gpt2-")]


def hours_at(config: Config, device: Device, mfu: float) -> float:
    """Hours of a run at an MFU on the paper's basis: 6 FLOPs a token and weight."""
    tokens = config.train.steps * config.train.batch_size * config.model.seq_len
    return tokens * weight_flops(config.model) / (mfu * device.bf16) / 3600


def matrix_sum(found: Sequence[Estimate]) -> list[str]:
    """The matrix's hours as predicted; those of the paper's own runs also at two MFUs."""
    device = found[0].target.device
    paper, half = (sum(hours_at(e.config, device, mfu) for e in found) for mfu in (PAPER_MFU, 0.5))
    tokens = [e.config.train.steps * e.tokens for e in found]
    ours = sum(n * flops_per_token(e.config) for n, e in zip(tokens, found, strict=True))
    share = ours / (PAPER_HOURS * 3600 * DEVICES["h200"].bf16)
    predicted = [
        f"{len(found)} runs of {in_tokens(tokens[0])}, hours on {device.title}:",
        f"{sum(e.hours for e in found):8,.0f}  predicted here",
    ]
    if paper != sum(hours_at(config, device, PAPER_MFU) for config in matrix()):
        return predicted  # overrides made them other runs than the paper's
    return [
        *predicted,
        f"{PAPER_HOURS:8,}  as the paper reports, on H200",
        f"{paper:8,.0f}  at its MFU, {PAPER_MFU:.0%} on the basis of 6 FLOPs a token and weight",
        f"{half:8,.0f}  at 50% on that basis: {paper - half:,.0f} saved",
        f"On the FLOPs that MFU counts above, attention's too, the paper's hours are {share:.0%}.",
    ]


def show(config: Config, device: str, json_wanted: bool) -> None:
    """Print what one run would take."""
    e = estimate(config, target_of(device))
    print(json.dumps(as_json(e), indent=2) if json_wanted else "\n".join(describe(e)))


def show_many(configs: list[Config], device: str, json_wanted: bool, total: bool) -> None:
    """Print a line for each run, as it is found, on all cores; with `total` their sum."""
    target, found = target_of(device), []
    if not json_wanted:
        print(f"predicted for {target.device.title}; nothing was run\n{HEAD}")
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        unique = {cost_key(config): config for config in configs}
        waiting = {key: pool.submit(estimate, config, target) for key, config in unique.items()}
        try:
            for config in configs:
                e = waiting[cost_key(config)].result()
                e = e._replace(config=dataclasses.replace(e.config, preset=config.preset))
                found.append(e)
                if not json_wanted:
                    print(row(e), flush=True)
        except BaseException:  # such as a reader that has left: start no other
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if json_wanted:
        print(json.dumps([as_json(e) for e in found], indent=2))
    elif total:
        print("\n".join(matrix_sum(found)))


def cost_key(config: Config) -> Config:
    """Return the configuration without fields that change no estimate: its name, LOOM's gamma."""
    return dataclasses.replace(config.replace("model.loom", scaling=True), preset="")
