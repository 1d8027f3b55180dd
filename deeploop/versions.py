"""Of what software figures are: they are written down beside them."""

import shutil
import subprocess
from pathlib import Path

import torch

from deeploop import __version__
from deeploop.kernels import _launch


def versions() -> dict[str, str | None]:
    """deeploop's own with its commit, torch's and Triton's; None for what is not there."""
    return {
        "deeploop": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "triton": _launch.triton.__version__ if _launch.triton else None,
    }


def commit() -> str | None:
    """Of the checkout that runs, "-dirty" where it was changed; None outside of one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
