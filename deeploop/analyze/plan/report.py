"""Print predictions of runs: one in lines or JSON, many in a table, DeepLoop's matrix in sum."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from deeploop.analyze.plan.hardware import DEVICES, Device
from deeploop.analyze.plan.planner import Estimate, against_full, estimate, target_of
from deeploop.config import Config
from deeploop.config.presets import presets
from deeploop.model.flops import flops_per_token, weight_flops
from deeploop.utils.memory import in_bytes
from deeploop.utils.processes import worker_pool

GIB = 2**30
# The 16 runs of DeepLoop (arXiv 2607.13491): H200-hours as reported, and the MFU that its
# sister paper's rates come to when FLOPs are 6 a token and weight, attention left out.
PAPER_HOURS, PAPER_MFU = 3700, 0.29
LOOM_GIB = {"segments": 12.6, "full": 19.3}  # arXiv 2610.01153, 329M at 12 loops, on an NPU

HEAD = (
    f"{'preset':40} {'parameters':>13} {'memory':>13} {'micro':>5} {'largest':>7} {'tokens/s':>9} "
    f"{'MFU':>5} {'run':>14}"
)


def show(config: Config, device: str, json_wanted: bool) -> None:
    """Predict and print one run."""
    e = estimate(config, target_of(device))
    print(json.dumps(as_json(e), indent=2) if json_wanted else "\n".join(describe(e)))


def show_many(configs: list[Config], device: str, json_wanted: bool, total: bool) -> None:
    """Predict runs on all cores and print a line for each when ready; with `total` their sum."""
    target, estimates = target_of(device), []
    if not json_wanted:
        print(f"predicted for {target.device.title}; nothing was run\n{HEAD}")
    with worker_pool() as pool:
        unique = {cost_key(config): config for config in configs}
        waiting = {key: pool.submit(estimate, config, target) for key, config in unique.items()}
        try:
            for config in configs:
                e = waiting[cost_key(config)].result()
                e = e._replace(config=dataclasses.replace(e.config, preset=config.preset))
                estimates.append(e)
                if not json_wanted:
                    print(row(e), flush=True)
        except BaseException:  # such as a closed pipe: start no further estimates
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if json_wanted:
        print(json.dumps([as_json(e) for e in estimates], indent=2))
    elif total:
        print("\n".join(matrix_sum(estimates)))


def cost_key(config: Config) -> Config:
    """Return the configuration without fields that change no estimate: its name, LOOM's gamma."""
    return dataclasses.replace(config.replace("model.loom", scaling=True), preset="")


def as_json(e: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON: bytes, seconds, tokens and hours."""
    return {
        "preset": e.config.preset,
        "device": e.target.device.title,
        "parameters": e.parameters,
        "tokens_per_step": e.tokens,
        "flops_per_token": flops_per_token(e.config),
        "memory": e.memory._asdict() | {"peak": e.memory.peak, "room": e.target.room},
        "largest_micro_batch": e.largest,
        "seconds": e.by_component | {"host": e.host, "step": e.seconds},
        "tokens_per_second": e.rate,
        "mfu": e.mfu,
        "run_hours": e.hours,
    }


def describe(e: Estimate) -> list[str]:
    """Return the lines printed for one run."""
    t, m, device = e.config.train, e.config.model, e.target.device
    sequences = t.micro_batch or t.batch_size
    backprop = t.backprop if t.backprop == "full" else f"{t.backprop}, {t.backprop_loops} loops"
    compiled = ", compiled" if t.compile else ""
    recompute = "" if t.recompute == "none" else f", each {t.recompute} run again"
    memory = " + ".join(f"{name} {in_bytes(b)}" for name, b in e.memory._asdict().items())
    device_seconds = sum(e.by_component.values())
    step = f"{e.seconds:.4g} s" if e.seconds >= 1 else f"{1e3 * e.seconds:.4g} ms"
    lines = [
        f"predicted for {device.title}; nothing was run",
        f"model    {e.config.preset}: {e.parameters:,} parameters, "
        f"{in_flops(flops_per_token(e.config))} a token",
        f"step     {e.tokens:,} tokens: {t.batch_size} x {m.seq_len}, micro-batches of "
        f"{sequences}, {t.precision}{compiled}; backprop {backprop}{recompute}",
        f"memory   {in_bytes(e.memory.peak)} = {memory}",
        f"         {'fits' if e.fits else 'does not fit'} in {e.target.room / GIB:.1f} GiB; "
        f"largest micro-batch: {e.largest}",
        f"time     {step} a step"
        + (", bound by the host's launches" if e.host > device_seconds else ""),
        *(
            f"         {100 * seconds / device_seconds:5.1f}%  {component}"
            for component, seconds in sorted(e.by_component.items(), key=lambda x: -x[1])
        ),
        f"speed    {e.rate:,.0f} tokens/s, MFU {100 * e.mfu:.1f}%",
        f"run      {in_tokens(t.steps * e.tokens)}: {in_time(3600 * e.hours)} on one device",
    ]
    if t.backprop != "full":
        lines.append(
            f"backprop {against_full(e):.2f} of the memory of full backprop{loom_paper(e)}"
        )
    return lines


def loom_paper(e: Estimate) -> str:
    """Return the memory that LOOM's paper reports; empty for other runs than its own."""
    m, t = e.config.model, e.config.train
    if not e.config.preset.startswith("loom-329m") or (m.loops, t.backprop) != (12, "segments"):
        return ""
    segments, full = LOOM_GIB.values()
    return f" (paper: {segments} of {full} GiB, {segments / full:.2f}, on an NPU)"


def row(e: Estimate) -> str:
    """Return one estimate in one line, under HEAD."""
    t = e.config.train
    return (
        f"{e.config.preset:40} {e.parameters:13,} {in_bytes(e.memory.peak):>13} "
        f"{t.micro_batch or t.batch_size:5} {e.largest:7} {e.rate:9,.0f} {100 * e.mfu:4.1f}% "
        f"{in_time(3600 * e.hours):>14}"
    )


def matrix() -> list[Config]:
    """Return DeepLoop's 16 runs: two sizes, R of 1, 3, 5 and 7, two residual rules."""
    return [config for name, config in presets().items() if name.startswith("gpt2-")]


def hours_at(config: Config, device: Device, mfu: float) -> float:
    """Return the hours of a run at an MFU that counts FLOPs as the paper does: 6 a weight."""
    tokens = config.train.steps * config.train.batch_size * config.model.seq_len
    return tokens * weight_flops(config.model) / (mfu * device.bf16) / 3600


def matrix_sum(estimates: Sequence[Estimate]) -> list[str]:
    """Return lines with the matrix's predicted hours; for the paper's own runs at two MFUs, too."""
    device = estimates[0].target.device
    paper, half = (
        sum(hours_at(e.config, device, mfu) for e in estimates) for mfu in (PAPER_MFU, 0.5)
    )
    tokens = [e.config.train.steps * e.tokens for e in estimates]
    flops = sum(n * flops_per_token(e.config) for n, e in zip(tokens, estimates, strict=True))
    share = flops / (PAPER_HOURS * 3600 * DEVICES["h200"].bf16)
    predicted = [
        f"{len(estimates)} runs of {in_tokens(tokens[0])}, hours on {device.title}:",
        f"{sum(e.hours for e in estimates):8,.0f}  predicted here",
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


def in_time(seconds: float) -> str:
    """Format seconds in hours, minutes or seconds."""
    for unit, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} seconds"


def in_tokens(n: int) -> str:
    """Format a number of tokens in billions or millions."""
    return f"{n / 1e9:,.2f} B tokens" if n >= 1e9 else f"{n / 1e6:.3g} million tokens"


def in_flops(n: float) -> str:
    """Format FLOPs in GFLOP or MFLOP."""
    return f"{n / 1e9:,.2f} GFLOP" if n >= 1e9 else f"{n / 1e6:.3g} MFLOP"
