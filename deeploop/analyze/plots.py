"""Draw profile.png, diagnose.png and the pictures of `deeploop eval`."""

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from deeploop.analyze.profile.trace import PHASES, StepSection
from deeploop.utils.figures import (
    Line,
    integer_ticks,
    log_scale,
    log_scale_if_wide,
    loop_matrix,
    save_figure,
    shaded_lines,
)


def profile(
    figures: dict[str, Any],
    curve: list[tuple[float, int]],
    sections: list[StepSection],
    path: Path,
) -> None:
    """Draw one page of a profile: time by component, memory, the GPU's readings.

    Args:
        figures: those of profile.json.
        curve: (ms, bytes) over the traced step.
        sections: forward and backward of its segments, and the optimizer.
        path: the PNG file.
    """
    readings = figures["telemetry"] if isinstance(figures["telemetry"], dict) else {}
    figure = Figure(figsize=(9, 9 if readings else 7), layout="constrained")
    top, middle, *below = figure.subplots(3 if readings else 2, 1)
    mfu = f", MFU {figures['mfu']:.1%}" if "mfu" in figures else ""
    figure.suptitle(
        f"{figures['preset']} on {figures['device']}: {figures['step_ms']:.1f} ms a step, "
        f"{figures['tokens_per_second']:,.0f} tokens/s{mfu}"
    )
    _components(top, figures)
    _memory(middle, curve, sections)
    for axes in below:
        _telemetry(axes, readings)
    save_figure(figure, path)


def _components(axes: Any, figures: dict[str, Any]) -> None:
    """Draw a bar for each component, with the phases in colours."""
    by_component = figures["parts_ms"]
    total = sum(sum(by_phase.values()) for by_phase in by_component.values())
    left = dict.fromkeys(by_component, 0.0)
    for i, phase in enumerate(PHASES):
        widths = [by_phase.get(phase, 0.0) for by_phase in by_component.values()]
        if not any(widths):
            continue
        axes.barh(list(by_component), widths, left=list(left.values()), label=phase, color=f"C{i}")
        left = {name: left[name] + w for name, w in zip(by_component, widths, strict=True)}
    for name, ms in left.items():
        axes.annotate(f" {ms / total:.1%}", (ms, name), va="center", fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.1 * max(left.values()))
    axes.set_xlabel(f"ms of the traced step of {figures['traced_step_ms']:.1f} ms")
    axes.set_title(f"time, by {figures['clock']}", fontsize="medium")
    axes.legend(fontsize="small")


def _memory(axes: Any, curve: list[tuple[float, int]], sections: list[StepSection]) -> None:
    """Draw the bytes of tensors over the step, with its sections in the background."""
    end = max([curve[-1][0], *(s.end for s in sections)])
    ms, sizes = zip(*curve, (end, curve[-1][1]), strict=True)
    unit, scale = ("GiB", 2**30) if max(sizes) >= 2**30 else ("MiB", 2**20)
    axes.step(ms, [b / scale for b in sizes], where="post", linewidth=0.8, color="black")
    # A colour for each phase, not for each name: there may be many segments.
    kinds = [s.name.rpartition(" ")[2] for s in sections]
    for i, (s, kind) in enumerate(zip(sections, kinds, strict=True)):
        colour = PHASES.index(kind if kind in PHASES else "outside")  # that of the bars
        label = None if kind in kinds[:i] else kind
        axes.axvspan(s.start, s.end, alpha=0.25, color=f"C{colour}", label=label, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ms of the host")
    axes.set_ylabel(f"{unit} of tensors")
    axes.set_title("memory over the traced step", fontsize="medium")
    axes.legend(fontsize="small")


def _telemetry(axes: Any, readings: dict[str, list[float]]) -> None:
    """Draw each reading over the timed steps, as a share of its largest."""
    for name, values in readings.items():
        if name != "seconds":
            largest = max(values) or 1
            label = f"{name}, up to {largest:,.0f}"
            axes.plot(readings["seconds"], [v / largest for v in values], label=label)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("s of the timed steps")
    axes.set_ylabel("share of the largest")
    axes.set_title("telemetry", fontsize="medium")
    axes.legend(fontsize="small")


def diagnosis(readings: list[dict[str, Any]], path: Path) -> None:
    """Draw kappa_R by step, and the newest state's cosines, norms, stream and experts."""
    last = readings[-1]
    routed = "router_overlap" in last
    figure = Figure(figsize=(17 if routed else 13, 8), layout="constrained")
    panels = figure.subplots(2, 4 if routed else 3)
    _kappa(panels[0, 0], readings)
    by_branch = [b["g_cosines"] for b in last["branches"]]
    cosines = [[sum(column) / len(by_branch) for column in zip(*rows, strict=True)]
               for rows in zip(*by_branch, strict=True)]  # fmt: skip
    loop_matrix(panels[0, 1], cosines, f"cosine of gradients, mean, step {last['step']}", -1)
    _norms(panels[0, 2], last["branches"])
    for axes, key in zip(panels[1], ("rms", "variance", "variance_between_tokens"), strict=False):
        _by_visit(axes, readings, key)
    if routed:
        loop_matrix(panels[0, 3], last["router_overlap"], "cosine of experts' loads", 0)
        panels[1, 3].plot(range(1, len(last["load_spread"]) + 1), last["load_spread"], marker=".")
        panels[1, 3].set_title("std / mean of the experts' loads")
        panels[1, 3].set_xlabel("loop")
        integer_ticks(panels[1, 3].xaxis)
    save_figure(figure, path)


def _kappa(axes: Any, readings: list[dict[str, Any]]) -> None:
    """Draw kappa_R by step, with lines at orthogonal (1) and aligned gradients (R)."""
    steps = [r["step"] for r in readings]
    axes.plot(steps, [r["kappa"] for r in readings], marker="o", label="kappa_R")
    axes.plot(
        steps, [r["kappa_directional"] for r in readings], marker="o", label="of directions alone"
    )
    loops = len(readings[0]["rms"])
    for value, name in ((1, "orthogonal"), (loops, "aligned"))[: 2 if loops > 1 else 1]:
        axes.axhline(value, linestyle=":", linewidth=1, color="grey")
        axes.annotate(name, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    log_scale(axes)
    axes.set_xlabel("step")
    integer_ticks(axes.xaxis)
    axes.legend(fontsize="small")


def _norms(axes: Any, branches: list[dict[str, Any]]) -> None:
    """Draw a line per sublayer over the loops: a colour per kind, fainter in earlier blocks."""
    count = len(branches) // 2
    for i, branch in enumerate(branches):
        block, kind = branch["sublayer"].split()
        axes.plot(
            range(1, len(branch["g"]) + 1),
            branch["g"],
            marker=".",
            color=f"C{i % 2}",
            alpha=int(block) / count,
            label=kind if int(block) == count else None,
        )
    axes.set_title("norm of each visit's gradient")
    axes.set_xlabel("loop")
    log_scale_if_wide(axes)
    integer_ticks(axes.xaxis)
    axes.legend(title="faint: first block" if count > 1 else None, fontsize="small")


def _by_visit(axes: Any, readings: list[dict[str, Any]], key: str) -> None:
    """Draw a line per state over the visits, in their order."""
    family = []
    for r in readings:
        values = [value for loop in r[key] for value in loop]
        family.append(Line(r["step"], range(1, len(values) + 1), values))
    shaded_lines(axes, family, "step")
    axes.set_title(f"stream: {key.replace('_', ' ')}")
    axes.set_xlabel("visit")
    log_scale_if_wide(axes)
    integer_ticks(axes.xaxis)


def by_loop(figures: dict[str, Any], path: Path) -> None:
    """Draw loss, change and divergence by loop, and what the model has of exits and starts.

    figures: those of eval's JSON file (`deeploop.analyze.evaluate`).
    """
    gate, taken, starts = (figures.get(name) for name in ("gate", "loops_taken", "starts"))
    extra = [x for x in (gate, taken, starts) if x]
    figure = Figure(figsize=(5 * (3 + len(extra)), 4), layout="constrained")
    figure.suptitle(f"{figures['preset']}, step {figures['step']}; dotted: loops in training")
    loss, change, kl, *more = figure.subplots(1, 3 + len(extra))
    _curve(loss, figures["loss"], "held-out loss, nats per token")
    for i, e in enumerate(figures["exits"]):
        loss.plot(e["loops"], e["loss"], "x", color=f"C{i + 1}", label=e["rule"])
    loss.legend(title="mean loops and loss at exit", fontsize="x-small")
    _curve(change, figures["change"], "relative change of the stream", positive=True)
    _curve(kl, figures["kl"], "KL from the loop before, nats", positive=True)
    panels = iter(more)
    if gate:
        _curve(next(panels), gate["p"], "exit probability of the gate")
    if taken:
        axes = next(panels)
        axes.bar(range(len(taken["shares"])), taken["shares"])
        axes.set_title("share of the tokens, by loops taken")
    if starts:
        axes = next(panels)
        axes.plot(starts["loops"], starts["cosine"], marker=".", label="cosine")
        axes.plot(starts["loops"], starts["distance"], marker=".", label="relative distance")
        axes.set_title(f"states from {starts['starts']} starts")
        axes.legend(fontsize="small")
    for axes in (loss, change, kl, *more):
        axes.axvline(figures["trained_loops"], linestyle=":", linewidth=1, color="grey")
        axes.set_xlabel("loops")
        integer_ticks(axes.xaxis)
    save_figure(figure, path)


def by_segment(figures: dict[str, Any], path: Path) -> None:
    """Draw right answers and halting by segment.

    figures: those of `deeploop.analyze.evaluate_reasoner`.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(f"{figures['preset']}, step {figures['step']}, on {figures['data']}")
    right, loss = figure.subplots(1, 2)
    segments = range(1, len(figures["exact"]) + 1)
    for name, label in (("exact", "puzzles solved"), ("token", "cells right"), ("wants", "halted")):
        right.plot(segments, figures[name], marker=".", label=label)
    right.set_title("share")
    right.legend(fontsize="small")
    _curve(loss, figures["loss"], "held-out loss, nats per label")
    for axes in (right, loss):
        axes.set_xlabel("segments")
        integer_ticks(axes.xaxis)
    save_figure(figure, path)


def _curve(axes: Any, values: list[float], title: str, positive: bool = False) -> None:
    """Draw the values by loop, from 1 on, that are finite.

    positive: leave out those that are not, too; logarithmic where they differ much.
    """
    points = [(t, y) for t, y in enumerate(values, 1)
              if math.isfinite(y) and (y > 0 or not positive)]  # fmt: skip
    if points:
        axes.plot(*zip(*points, strict=True), marker=".", color="C0")
    if points and positive:
        log_scale_if_wide(axes)
    axes.set_title(title)
