"""Modules that the command line needs for --help do not import torch, which is slow."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["utils.errors", "utils.disk", "utils.console", "config"])
def test_torch_is_not_imported(module):
    script = f"import sys, deeploop.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
