"""Read the software versions that are recorded with every result."""

import shutil
import subprocess
from pathlib import Path

import torch

try:
    import triton
except ImportError:
    triton = None

from deeploop import __version__


def versions() -> dict[str, str | None]:
    """Return the versions of deeploop (with its commit), torch and Triton; None if absent."""
    return {
        "deeploop": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "triton": getattr(triton, "__version__", None),
    }


def commit() -> str | None:
    """Return the commit of this checkout, ending in "-dirty" if files differ from it.

    None where the package does not run from a git checkout, or git is not installed.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
