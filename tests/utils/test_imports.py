"""Modules that the command line needs for --help do not import torch, which is slow."""

import subprocess
import sys

MODULES = ("utils.errors", "utils.disk", "utils.foreign", "utils.console", "config")


def test_torch_is_not_imported():
    script = f"""
import importlib, sys
for name in {MODULES}:
    importlib.import_module(f"deeploop.{{name}}")
    assert "torch" not in sys.modules, name
"""
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
