"""Importing the kernels needs neither Triton nor a GPU."""

import subprocess
import sys
from pathlib import Path

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from torch._subclasses import FakeTensorMode
from deeploop import kernels
from tests.helpers.kernel_modules import uses_triton
x = torch.randn(2, 4, requires_grad=True)
h, n = kernels.post_sandwich(x, x, None, None, 1.0)
(h + n).sum().backward()
assert x.grad is not None
with FakeTensorMode():
    x = torch.empty(2, 4, device="cuda")
try:
    uses_triton(x)
except RuntimeError as error:
    print(error)
"""


def test_without_triton():
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", WITHOUT_TRITON]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    message = "CUDA tensors need Triton, which is not installed: pip install triton"
    assert result.stdout.strip() == message
