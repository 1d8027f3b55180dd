"""Time and memory from a trace: hand-made events of a CPU and of CUDA, and brute force."""

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deeploop.analyze.profile.trace import (
    EVALUATE,
    IDLE,
    Interval,
    Label,
    events_of,
    exclusive_times,
    memory,
    sections,
    steps,
    time_by_label,
)

MAIN, ENGINE = 1, 2  # threads


def event(name, ts, end, tid=MAIN, cat="cpu_op", **args):
    named = {k.replace("_", " "): v for k, v in args.items()}
    return {
        "ph": "X", "cat": cat, "name": name, "ts": 1e9 + ts, "dur": end - ts, "tid": tid,
        "args": named,
    }  # fmt: skip


def span(name, ts, end, tid=MAIN):
    return event(f"deeploop/{name}", ts, end, tid, "user_annotation")


def node(name, ts, end, number, tid=MAIN):
    return event(EVALUATE + name, ts, end, tid, Sequence_number=number, Fwd_thread_id=1)


FORWARD = [
    span("step", 0, 1000),
    span("data", 0, 20),
    span("loops 1-2 forward", 20, 400),
    span("attention", 30, 100),
    event("aten::linear", 40, 80, Sequence_number=5),
    event("aten::mm", 50, 70, Sequence_number=6),
    event("aten::detach", 85, 95, Sequence_number=7),  # shows the router's number, makes no node
    span("experts", 100, 300),
    event("deeploop::sigmoid_router", 120, 150, Sequence_number=7),
    event("deeploop::experts", 200, 280, Sequence_number=8),
    span("updates", 300, 380),
    span("loops 1-2 backward", 400, 900),
]


def on_one_thread():
    return [
        *FORWARD,
        node("ExpertsBackward", 410, 500, 8),
        node("RouterBackward", 500, 550, 7),
        node("MmBackward0", 600, 700, 6),
        span("attention", 620, 680),  # recomputed
        event("aten::mm", 630, 640, Sequence_number=30),
        node("torch::autograd::AccumulateGrad", 700, 710, -1),
        span("optimizer", 900, 950),
    ]


def micro(times):
    return {tuple(label): round(ms * 1e3) for label, ms in times.items()}


def test_on_a_cpu_time_goes_to_the_innermost_event():
    events = on_one_thread()
    (step,) = steps(events)
    assert micro(time_by_label(events, step)) == {
        ("data", "outside"): 20,
        ("other", "forward"): 10 + 20,
        ("attention", "forward"): 70,
        ("experts", "forward"): 200 - 30,
        ("router", "forward"): 30,
        ("updates", "forward"): 80,
        ("experts", "backward"): 90,
        ("router", "backward"): 50,
        ("attention", "backward"): 40,
        ("attention", "recompute"): 60,
        ("gradient sums", "backward"): 10,
        ("other", "backward"): 500 - 90 - 50 - 100 - 10,
        ("optimizer", "outside"): 50,
        ("other", "outside"): 50,
    }


def kernel(ts, end, correlation, name="gemm", tid=7):
    return event(name, ts, end, tid, "kernel", correlation=correlation)


def launch(ts, correlation, tid=MAIN):
    return event("cudaLaunchKernel", ts, ts + 5, tid, "cuda_runtime", correlation=correlation)


def test_on_cuda_kernels_take_the_label_of_their_launch_and_the_rest_is_idle():
    events = [
        *FORWARD,
        launch(55, 1),
        launch(125, 2),
        # The engine's thread counts its own nodes: its 8 is not the experts'.
        node("ExpertsBackward", 410, 500, 8, ENGINE),
        launch(420, 3, ENGINE),
        node("MmBackward0", 500, 600, 6, ENGINE),
        span("updates", 505, 515, ENGINE),
        event("aten::mul", 506, 512, ENGINE, Sequence_number=8),
        launch(507, 4, ENGINE),
        node("ExpertsBackward", 610, 620, 8, ENGINE),
        launch(611, 5, ENGINE),
        launch(920, 6),
        kernel(100, 200, 1),
        kernel(200, 250, 2),
        kernel(500, 600, 3),
        kernel(600, 650, 4),
        kernel(650, 700, 5),
        kernel(640, 800, 6, "ncclDevKernel_AllReduce", tid=8),
    ]
    (step,) = steps(events)
    times = time_by_label(events_of(events, step), step)
    assert micro(times) == {
        ("attention", "forward"): 100,
        ("router", "forward"): 50,
        ("experts", "backward"): 100 + 50,
        ("updates", "recompute"): 50,
        ("communication", "outside"): 100,  # where no other kernel runs
        tuple(IDLE): 1000 - 450,
    }
    assert sum(times.values()) == pytest.approx(1.0)


def test_a_kernel_without_a_launch_is_known_by_its_op():
    op = event("deeploop::experts", 10, 20, External_id=9)
    run = event("gemm", 30, 40, 7, "kernel", correlation=4, External_id=9)
    stray = event("gemm", 50, 60, 7, "kernel", correlation=5)
    events = [span("step", 0, 100), span("experts", 5, 25), op, run, stray]
    assert micro(time_by_label(events, events[0])) == {
        ("experts", "outside"): 10, ("other", "outside"): 10, tuple(IDLE): 80,
    }  # fmt: skip


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 15), st.booleans()), max_size=12),
    st.integers(1, 12),
)
def test_each_instant_goes_to_one_label(spans, total):
    intervals = [
        Interval(a, a + length, Label(str(i), ""), low_priority)
        for i, (a, length, low_priority) in enumerate(spans)
    ]
    times = exclusive_times(intervals, total)
    assert sum(times.values()) == total
    expected = defaultdict(float)
    for t in range(total):
        here = [i for i in intervals if i.start <= t < i.end]
        best = max(((not i.low_priority, i.start, -i.end) for i in here), default=None)
        same = [i.label for i in here if (not i.low_priority, i.start, -i.end) == best]
        expected[same[-1] if same else IDLE] += 1
    assert times == expected


def change(ts, size, total, kind=0):
    args = {"Device Type": kind, "Bytes": size, "Total Allocated": total}
    return {"ph": "i", "name": "[memory]", "ts": 1e9 + ts, "tid": MAIN, "args": args}


def test_memory_of_a_cpu_counts_from_the_bytes_at_the_start_of_the_step():
    step = span("step", 0, 1000)
    changes = [change(100, 5, 25), change(200, 7, 32), change(300, -5, 27), change(400, 9, 9, 1)]
    curve = memory([step, *changes], step, cuda=False, base=1000)
    assert curve == [(0.0, 1000), (0.1, 1005), (0.2, 1012), (0.3, 1007)]
    assert memory([step, *changes], step, cuda=True, base=1000) == [(0.0, 0), (0.4, 9)]
    assert memory([step], step, cuda=False, base=1000) == [(0.0, 1000)]


def test_peaks_of_the_sections_of_a_step():
    events = [
        span("step", 0, 1000), span("loops 1-2 forward", 0, 250), span("attention", 0, 250),
        span("loops 1-2 backward", 250, 900), span("optimizer", 900, 1000),
    ]  # fmt: skip
    curve = [(0.0, 10), (0.1, 30), (0.2, 20), (0.4, 25), (0.95, 5)]
    listed = sections(events, events[0], curve)
    assert [(s.name, s.peak) for s in listed] == [
        ("loops 1-2 forward", 30),
        ("loops 1-2 backward", 25),  # 20 at its start, then 25
        ("optimizer", 25),
    ]
    assert [(s.start, s.end) for s in listed] == [(0, 0.25), (0.25, 0.9), (0.9, 1.0)]
