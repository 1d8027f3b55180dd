"""Imports that a command waits for: help and the package itself load no heavy library."""

import subprocess
import sys

import pytest

from deeploop.cli import VERBS

HEAVY = ("torch", "numpy", "matplotlib", "triton")


def imported(code: str) -> set[str]:
    """Run code in a fresh interpreter; returns the names of the modules it has imported."""
    script = f"import sys\n{code}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_the_package_imports_no_heavy_library():
    assert not {*HEAVY, "rich", "tyro"} & imported("import deeploop")


def test_help_imports_no_heavy_library():
    loaded = imported("from deeploop.cli import main\nmain(['--help'])")
    assert not {*HEAVY, "rich", "tyro"} & loaded


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_verb_does_not_import_torch(verb):
    loaded = imported(
        "import contextlib\nfrom deeploop.cli import main\n"
        f"with contextlib.suppress(SystemExit): main(['{verb}', '--help'])"
    )
    assert not set(HEAVY) & loaded
