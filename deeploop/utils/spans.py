"""Name the components of a training step, so that a profiler can attribute its time.

    with span("attention"):
        f = branch(n)

appears in a torch profiler's trace as `deeploop/attention`; `deeploop.analyze.profile.trace`
adds the times up.
"""

import contextlib
from contextlib import AbstractContextManager

from torch.autograd import profiler

PREFIX = "deeploop/"
# The components a step's time is split into. "router" is recognised by its op's name,
# "gradient sums" by its autograd node; all others by a span.
COMPONENTS = (
    "data", "embedding", "attention", "mlp", "experts", "router", "updates", "loss",
    "gradient sums", "communication", "optimizer",
)  # fmt: skip


def span(name: str) -> AbstractContextManager:
    """Record the code inside as `deeploop/name`; does nothing where no profiler runs.

    A graph made by torch.compile leaves it out.
    """
    # A record_function costs ten microseconds even where nothing records it.
    if not profiler._is_profiler_enabled:
        return contextlib.nullcontext()
    return profiler.record_function(PREFIX + name)
