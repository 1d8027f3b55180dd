"""Only collected where Triton interprets; fresh memory is full of NaN here."""

import os

import pytest
import torch

from deeploop.kernels import _launch

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """What a kernel forgets to write shows up as NaN."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            x = allocate(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    torch.manual_seed(0)


@pytest.fixture
def kernels_run(monkeypatch):
    """A test that uses this must have launched a kernel, unless it clears the list."""
    launched = []
    run_launch = _launch.Launch.run

    def record(self, like):
        launched.append(self)
        return run_launch(self, like)

    monkeypatch.setattr(_launch.Launch, "run", record)
    yield launched
    assert launched, "the PyTorch path ran instead of a kernel"


@pytest.fixture
def guard(kernels_run, monkeypatch):
    """From the call on, all that kernels write to sits between values that must survive.

    The call returns the list of what they write to, with its surroundings.
    """
    value, pad = 12345.0, 64
    buffers = []
    record = _launch.Launch.run

    def guarded(self, like):
        inside = {}
        for name, x in self.args.items():
            if isinstance(x, torch.Tensor) and x.isnan().all():
                buffer = torch.full((x.numel() + 2 * pad,), value, dtype=x.dtype)
                inside[name] = buffer[pad:-pad].view(x.shape)
                inside[name].fill_(float("nan"))
                buffers.append(buffer)
        record(self._replace(args=self.args | inside), like)
        for name, x in inside.items():
            assert not x.isnan().any(), f"{name} was not written everywhere"
            self.args[name].copy_(x)

    def start():
        monkeypatch.setattr(_launch.Launch, "run", guarded)
        return buffers

    yield start
    for buffer in buffers:
        assert (buffer[:pad] == value).all() and (buffer[-pad:] == value).all()
