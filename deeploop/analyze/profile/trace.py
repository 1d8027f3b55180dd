"""Split a step's time and memory by component, from a torch profiler's Chrome trace.

The trace is written by `torch.profiler.profile(profile_memory=True).export_chrome_trace` around
steps whose components `deeploop.utils.spans` names; each whole step is in a span "step".

Time. On a CPU each instant of the main thread belongs to the innermost event around it. On CUDA
each instant belongs to the running kernel: of several to the one that started last, and to a
communication kernel only where no other runs; where none runs the instant is idle. A kernel
takes the label of the host call that launched it. In both cases the labels' times add up to the
step's.

A label is a component and a phase. The component is that of the innermost span. In backward it
is that of the forward op whose autograd node is evaluated, found by the node's sequence number:
an op shows the number that the next node will get, so a node belongs to the op that began last
among those with its number. Forward ops that backward runs again have the phase "recompute".
"""

import bisect
import gzip
import heapq
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from deeploop.kernels import registry
from deeploop.utils.spans import COMPONENTS, PREFIX

Event = dict[str, Any]

STEP = PREFIX + "step"
EVALUATE = "autograd::engine::evaluate_function: "
ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")  # categories of events
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
PHASES = ("forward", "recompute", "backward", "outside")  # outside: neither pass


class Label(NamedTuple):
    """The component and the phase that time is attributed to."""

    component: str  # one of COMPONENTS, or "other"; "idle" while a GPU has nothing to run
    phase: str  # one of PHASES


class Interval(NamedTuple):
    """A labelled event of the step, with its time on the clock of the step."""

    start: float  # ms from the step's start, as is end
    end: float
    label: Label
    low_priority: bool = False  # counts only where no other interval is


class StepSection(NamedTuple):
    """Forward or backward of a segment, or the optimizer, with its peak memory."""

    name: str  # "loops 1-3 forward", "loops 1-3 backward", "optimizer"
    start: float  # ms of the host from the step's start, as is end
    end: float
    peak: int  # bytes


OTHER, IDLE = Label("other", "outside"), Label("idle", "outside")


def read(path: Path) -> list[Event]:
    """Read the events of a trace.json.gz."""
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def steps(events: list[Event]) -> list[Event]:
    """Return the spans around whole steps, in order."""
    spans = (e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation")
    return sorted(spans, key=lambda e: e["ts"])


def events_of(events: list[Event], step: Event) -> list[Event]:
    """Return the events that begin within a step."""
    first, last = step["ts"], step["ts"] + step["dur"]
    return [e for e in events if first <= e.get("ts", -1) < last]


def has_kernels(events: list[Event]) -> bool:
    """Return whether the events include a GPU's kernels."""
    return any(e.get("cat") in ON_DEVICE for e in events)


def time_by_label(events: list[Event], step: Event) -> dict[Label, float]:
    """Return the milliseconds of a step by label; they add up to the step's duration.

    Args:
        events: of this step (`events_of`).
        step: its span.
    """
    host = [e for e in events if e.get("cat") in ON_HOST and e["ph"] == "X"]
    device = [e for e in events if e.get("cat") in ON_DEVICE]
    labelled = labels(host, step)
    if device:
        launches = {key: label for e, label in labelled for key in _launch(e)}
        intervals = [_kernel_interval(e, step, launches) for e in device]
    else:
        intervals = [_interval(e, step, x) for e, x in labelled if e["tid"] == step["tid"]]
    return exclusive_times(intervals, step["dur"] / 1e3)


def labels(host: list[Event], step: Event) -> list[tuple[Event, Label]]:
    """Label every event of the host; an event comes before those inside it.

    Autograd nodes are looked up among the ops of the step's thread, which runs the forward:
    each thread numbers its nodes separately.
    """
    nodes: dict[int, Label] = {}
    around: dict[int, list[tuple[float, Label]]] = defaultdict(list)  # by thread: end and label
    labelled = []
    # The forward's thread first: backward's thread, with the same timestamps, looks nodes up.
    for e in sorted(host, key=lambda e: (e["tid"] != step["tid"], e["ts"], -e["dur"])):
        stack = around[e["tid"]]
        while stack and stack[-1][0] <= e["ts"]:
            stack.pop()
        label = _label(e, stack[-1][1] if stack else OTHER, nodes)
        number = e.get("args", {}).get("Sequence number", -1)
        forward = e["tid"] == step["tid"] and not e["name"].startswith(EVALUATE)
        if forward and number >= 0:
            nodes[number] = label
        stack.append((e["ts"] + e["dur"], label))
        labelled.append((e, label))
    return labelled


def _label(e: Event, outer: Label, nodes: dict[int, Label]) -> Label:
    name = e["name"]
    if name.startswith(EVALUATE):
        if name.endswith("AccumulateGrad"):
            return Label("gradient sums", "backward")
        forward = nodes.get(e["args"].get("Sequence number", -1), OTHER)
        return Label(forward.component, "backward")
    component = registry.component(name)
    if component:
        return Label(component, outer.phase)
    if not name.startswith(PREFIX):
        return outer
    name = name.removeprefix(PREFIX)
    if name in COMPONENTS:
        return Label(name, "recompute" if outer.phase == "backward" else outer.phase)
    phase = name.rpartition(" ")[2]
    return Label("other", phase) if phase in PHASES else outer


def _launch(e: Event) -> list[tuple[str, int]]:
    """Return the keys that a kernel shares with the event that launched it, most exact first."""
    return [(k, e["args"][k]) for k in ("correlation", "External id") if k in e.get("args", {})]


def _kernel_interval(e: Event, step: Event, launches: dict[tuple[str, int], Label]) -> Interval:
    label = next((launches[key] for key in _launch(e) if key in launches), OTHER)
    if "nccl" in e["name"].lower():
        label = Label("communication", label.phase)
    return _interval(e, step, label, low_priority=label.component == "communication")


def _interval(e: Event, step: Event, label: Label, low_priority: bool = False) -> Interval:
    start = (e["ts"] - step["ts"]) / 1e3
    return Interval(start, start + e["dur"] / 1e3, label, low_priority)


def exclusive_times(intervals: list[Interval], total: float) -> dict[Label, float]:
    """Divide the range [0, total) among labels; time that no interval covers is idle.

    Where intervals overlap, the instant goes to the one that began last, and of those that
    began together to the shortest.
    """
    times: dict[Label, float] = defaultdict(float)
    order = sorted(intervals, key=lambda i: (i.start, -i.end))
    edges = sorted({0.0, total, *(t for i in order for t in i[:2] if 0 < t < total)})
    running: list[tuple[bool, int]] = []  # heap: the instant goes to its first
    begun = 0
    for start, end in itertools.pairwise(edges):
        while begun < len(order) and order[begun].start <= start:
            heapq.heappush(running, (order[begun].low_priority, -begun))
            begun += 1
        while running and order[-running[0][1]].end <= start:
            heapq.heappop(running)
        times[order[-running[0][1]].label if running else IDLE] += end - start
    return dict(times)


def memory(events: list[Event], step: Event, cuda: bool, base: int) -> list[tuple[float, int]]:
    """Return the bytes of tensors over a step: (ms from its start, bytes from then on).

    Args:
        events: of this step.
        step: its span.
        cuda: read the CUDA allocator, which reports all allocated bytes.
        base: bytes allocated as the step begins. A CPU's allocator counts from the start of
            the profiler, so they are added to its reports.
    """
    kind = 1 if cuda else 0
    changes = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == kind]
    if not changes:
        return [(0.0, base)]
    changes.sort(key=lambda e: (e["ts"], e["args"].get("Ev Idx", 0)))
    first = changes[0]["args"]["Total Allocated"] - changes[0]["args"]["Bytes"]
    shift = 0 if cuda else base - first
    return [(0.0, first + shift)] + [
        ((e["ts"] - step["ts"]) / 1e3, e["args"]["Total Allocated"] + shift) for e in changes
    ]


def sections(events: list[Event], step: Event, curve: list[tuple[float, int]]) -> list[StepSection]:
    """List forward and backward of each segment and micro-batch, and the optimizer, in order.

    Args:
        events: of this step.
        step: its span.
        curve: bytes over the step, from `memory`.
    """
    result = []
    for e in sorted(events, key=lambda e: e.get("ts", 0)):
        name = e["name"].removeprefix(PREFIX)
        is_section = name == "optimizer" or name.rpartition(" ")[2] in PHASES
        if not is_section or e.get("cat") != "user_annotation":
            continue
        interval = _interval(e, step, OTHER)
        first = bisect.bisect_right(curve, (interval.start, 0)) - 1
        last = bisect.bisect_left(curve, (interval.end, 0))
        peak = max(size for _, size in curve[max(0, first) : max(1, last)])
        result.append(StepSection(name, interval.start, interval.end, peak))
    return result
