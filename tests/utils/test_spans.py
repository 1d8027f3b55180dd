"""Names that a profiler finds, and that cost nothing where there is none."""

import contextlib

from torch.profiler import ProfilerActivity, profile

from deeploop.utils.spans import PREFIX, span


def test_a_span_is_a_named_event_of_a_profile_and_else_nothing():
    assert isinstance(span("attention"), contextlib.nullcontext)
    with profile(activities=[ProfilerActivity.CPU]) as seen, span("attention"):
        pass
    assert PREFIX + "attention" in {e.name for e in seen.events()}
    assert isinstance(span("attention"), contextlib.nullcontext)
