"""Where a step's time and memory went, read out of a torch profiler's Chrome trace.

The trace is what `torch.profiler.profile(profile_memory=True).export_chrome_trace` writes
of steps that `deeploop.utils.spans` put names on, the whole of each in a span "step".

Time. On a CPU each instant of the main thread belongs to the innermost event around it.
On CUDA each instant belongs to the kernel that runs (the one started last, and one of
communication only where no other runs) and is idle where none does; a kernel takes the
label of the host call that launched it. Either way the labels' times add up to the step.

A label is a part and a phase. The part is that of the innermost span; in backward, that
of the forward op whose autograd node is evaluated, found by the node's sequence number:
an op shows the number that the next node gets, so that a node is of the op that was
begun last with its number. Forward ops that backward runs again are phase "recompute".
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
PHASES = ("forward", "recompute", "backward", "outside")  # of neither pass: outside


class Label(NamedTuple):
    """Where time goes."""

    part: str  # of COMPONENTS, or "other"; "idle" while a GPU has nothing to run
    phase: str  # of PHASES


class Interval(NamedTuple):
    """A labelled event of the step."""

    start: float  # ms from the step's start, as is end
    end: float
    label: Label
    behind: bool = False  # owns an instant only where no other interval is


class Stretch(NamedTuple):
    """A part of the step between two boundaries, and the most memory held in it."""

    name: str  # "loops 1-3 forward", "loops 1-3 backward", "optimizer"
    start: float  # ms of the host from the step's start, as is end
    end: float
    peak: int  # bytes


OTHER, IDLE = Label("other", "outside"), Label("idle", "outside")


def read(path: Path) -> list[Event]:
    """The events of a trace.json.gz."""
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def steps(events: list[Event]) -> list[Event]:
    """The spans around whole steps, in order."""
    found = (e for e in events if e["name"] == STEP and e.get("cat") == "user_annotation")
    return sorted(found, key=lambda e: e["ts"])


def within(events: list[Event], step: Event) -> list[Event]:
    """The events that begin in a step."""
    first, last = step["ts"], step["ts"] + step["dur"]
    return [e for e in events if first <= e.get("ts", -1) < last]


def has_kernels(events: list[Event]) -> bool:
    """Whether the trace shows what ran on a GPU."""
    return any(e.get("cat") in ON_DEVICE for e in events)


def split(events: list[Event], step: Event) -> dict[Label, float]:
    """Milliseconds of a step by label; they add up to the step's own.

    events: those `within` the step.
    """
    host = [e for e in events if e.get("cat") in ON_HOST and e["ph"] == "X"]
    device = [e for e in events if e.get("cat") in ON_DEVICE]
    labelled = labels(host, step)
    if device:
        launches = {key: label for e, label in labelled for key in _launch(e)}
        intervals = [_of_kernel(e, step, launches) for e in device]
    else:
        intervals = [_interval(e, step, x) for e, x in labelled if e["tid"] == step["tid"]]
    return owned(intervals, step["dur"] / 1e3)


def labels(host: list[Event], step: Event) -> list[tuple[Event, Label]]:
    """Every event of the host with its label, outer ones before those inside them.

    Autograd nodes are looked up among the ops of the step's own thread, which runs the
    forward: each thread counts its own.
    """
    nodes: dict[int, Label] = {}
    around: dict[int, list[tuple[float, Label]]] = defaultdict(list)  # by thread: what encloses
    found = []
    # The forward's thread first: it goes before the backward's, whose clock may be the same.
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
        found.append((e, label))
    return found


def _label(e: Event, outer: Label, nodes: dict[int, Label]) -> Label:
    name = e["name"]
    if name.startswith(EVALUATE):
        if name.endswith("AccumulateGrad"):
            return Label("gradient sums", "backward")
        return Label(nodes.get(e["args"].get("Sequence number", -1), OTHER).part, "backward")
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
    """What a kernel and the event that launched it have in common, the surest first."""
    return [(k, e["args"][k]) for k in ("correlation", "External id") if k in e.get("args", {})]


def _of_kernel(e: Event, step: Event, launches: dict[tuple[str, int], Label]) -> Interval:
    label = next((launches[key] for key in _launch(e) if key in launches), OTHER)
    if "nccl" in e["name"].lower():
        label = Label("communication", label.phase)
    return _interval(e, step, label, behind=label.part == "communication")


def _interval(e: Event, step: Event, label: Label, behind: bool = False) -> Interval:
    start = (e["ts"] - step["ts"]) / 1e3
    return Interval(start, start + e["dur"] / 1e3, label, behind)


def owned(intervals: list[Interval], total: float) -> dict[Label, float]:
    """How long each label has the range [0, total) to itself; what none covers is idle.

    Of intervals that overlap, the one that began last owns the instant, or of two that
    began together the shorter.
    """
    times: dict[Label, float] = defaultdict(float)
    order = sorted(intervals, key=lambda i: (i.start, -i.end))
    edges = sorted({0.0, total, *(t for i in order for t in i[:2] if 0 < t < total)})
    running: list[tuple[bool, int]] = []  # heap: its first owns
    begun = 0
    for start, end in itertools.pairwise(edges):
        while begun < len(order) and order[begun].start <= start:
            heapq.heappush(running, (order[begun].behind, -begun))
            begun += 1
        while running and order[-running[0][1]].end <= start:
            heapq.heappop(running)
        times[order[-running[0][1]].label if running else IDLE] += end - start
    return dict(times)


def memory(events: list[Event], step: Event, cuda: bool, base: int) -> list[tuple[float, int]]:
    """Bytes of tensors over a step: (ms from its start, bytes from then on).

    CUDA's allocator reports all that it holds. What a CPU's reports counts from where the
    profiler began: there `base`, what is held as the step begins, is added.
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


def stretches(events: list[Event], step: Event, curve: list[tuple[float, int]]) -> list[Stretch]:
    """Forward and backward of each segment of each micro-batch, and the optimizer, in order."""
    found = []
    for e in sorted(events, key=lambda e: e.get("ts", 0)):
        name = e["name"].removeprefix(PREFIX)
        bounds = name == "optimizer" or name.rpartition(" ")[2] in PHASES
        if not bounds or e.get("cat") != "user_annotation":
            continue
        interval = _interval(e, step, OTHER)
        first = bisect.bisect_right(curve, (interval.start, 0)) - 1
        last = bisect.bisect_left(curve, (interval.end, 0))
        peak = max(held for _, held in curve[max(0, first) : max(1, last)])
        found.append(Stretch(name, interval.start, interval.end, peak))
    return found
