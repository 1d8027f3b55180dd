"""Results are recorded with the commit they come from."""

import shutil
import subprocess
from pathlib import Path

import pytest

from deeploop.utils.versions import commit, versions

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a git checkout"
)
def test_the_commit_is_that_of_the_checkout():
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    described = commit()
    assert described is not None
    assert head.startswith(described.removesuffix("-dirty").rpartition("-g")[2])


def test_versions_name_all_three_packages():
    assert versions().keys() == {"deeploop", "commit", "torch", "triton"}
