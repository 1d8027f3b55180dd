"""Runs each file of tests of the Triton kernels themselves, on CPU, in a process of its own."""

import pytest

from tests.helpers.interpreted import KERNEL_TESTS, run_interpreted

pytest.importorskip("triton", reason="Triton is not installed")
FILES = sorted((KERNEL_TESTS / "interpreter").glob("test_*.py"))


@pytest.mark.parametrize("file", [f.stem for f in FILES])
def test_kernels_under_the_interpreter(file, tmp_path):
    code, output = run_interpreted([f"interpreter/{file}.py"], tmp_path)
    if code != 0:
        pytest.fail(f"exit code {code}:\n{output}", pytrace=False)
