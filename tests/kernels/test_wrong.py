"""The tests are tested: each wrong kernel of wrong.py must make them fail."""

import shutil
from pathlib import Path

import pytest

import deeploop
import deeploop.kernels
from tests.helpers.interpreted import run_interpreted
from tests.kernels.wrong import WRONG

pytest.importorskip("triton", reason="Triton is not installed")
PACKAGE = Path(deeploop.__file__).parent
KERNELS = Path(deeploop.kernels.__file__).parent


def clone(folder):
    """Copy the package, compiled files included, and return the folder of its kernels."""
    shutil.copytree(PACKAGE, folder / "deeploop")
    return shutil.copytree(KERNELS, folder / "deeploop" / "kernels")


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_a_wrong_kernel_is_rejected(wrong, tmp_path):
    source = clone(tmp_path) / wrong.file
    text = source.read_text()
    assert text.count(wrong.old) == 1, f"{wrong.file} no longer holds this once: {wrong.old}"
    source.write_text(text.replace(wrong.old, wrong.new))
    code, output = run_interpreted([wrong.test], tmp_path, first_on_path=tmp_path)
    # 1: tests ran and failed; below 0: the kernel took the process with it, as a write out
    # of bounds may. Not 2 to 5: nothing was collected, so nothing was learnt.
    assert code == 1 or code < 0, output


def test_the_right_kernels_are_accepted_in_the_same_place(tmp_path):
    """All tests above pass on an unchanged clone: they reject the kernels and nothing else."""
    clone(tmp_path)
    tests = sorted({wrong.test for wrong in WRONG})
    code, output = run_interpreted(tests, tmp_path, first_on_path=tmp_path)
    assert code == 0, output
