"""These tests run where Triton interprets, in processes that test_interpreter.py starts."""

import os

import pytest
import torch

from tests.helpers.launches import guard_launches, patch_language_once, poison_fresh_memory

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def launches(monkeypatch):
    """Guard the memory around all that kernels write; a test must launch at least one."""
    poison_fresh_memory(monkeypatch)
    patch_language_once(monkeypatch)
    recorded = guard_launches(monkeypatch)
    yield recorded
    assert recorded, "the PyTorch path ran instead of a kernel"
