"""Names on the parts of a training step, for a profiler to find.

    with span("attention"):
        f = branch(n)

shows in a torch profiler's trace as `deeploop/attention`; `deeploop.analyze.profile.trace` sums them up.
"""

import contextlib
from contextlib import AbstractContextManager

from torch.autograd import profiler

PREFIX = "deeploop/"
# Where a step's time may go; the router is told by its op, the sums by their autograd node.
PARTS = (
    "data", "embedding", "attention", "mlp", "experts", "router", "updates", "loss",
    "gradient sums", "communication", "optimizer",
)  # fmt: skip


def span(name: str) -> AbstractContextManager:
    """Put a name on what runs inside; nothing at all where no profiler runs.

    Left out of a graph that torch.compile makes.
    """
    # A record_function costs ten microseconds even where nothing records it.
    if not profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return profiler.record_function(PREFIX + name)
