"""Say how long a command took."""

import time


def since(began: float) -> str:
    """Return the time since `began` (time.perf_counter) in seconds, minutes or hours."""
    seconds = time.perf_counter() - began
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
