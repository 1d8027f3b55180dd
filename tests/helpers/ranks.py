"""Start several processes as torchrun does, and collect what they print."""

import os
import socket
import subprocess
import sys


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def start_ranks(command: list[str], world: int = 2) -> list[subprocess.Popen]:
    """One process a rank, as torchrun starts them."""
    port = free_port()
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path),
            },
        )
        for rank in range(world)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen], code: int = 0) -> list[str]:
    printed = [p.communicate(timeout=200)[0] for p in processes]
    assert [p.returncode for p in processes] == [code] * len(processes), "\n".join(printed)
    return printed
