"""Workers of a pool end with their parent, however it ends."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal, time
from functools import partial
from deeploop.utils.processes import worker_pool

if __name__ == "__main__":
    pool = worker_pool(2, partial(print, "ready", flush=True))
    idle, busy = pool.submit(os.getpid), pool.submit(time.sleep, 120)
    assert idle.result() != os.getpid()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    # The workers have the parent's output open: it ends when the last of them has.
    result = subprocess.run(
        [sys.executable, str(tmp_path / "parent.py")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == -9 and "ready" in result.stdout
