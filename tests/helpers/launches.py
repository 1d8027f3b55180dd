"""Record the kernels that ops launch, and guard the memory around what they write."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.helpers.kernel_modules import Launch

# Both are exact in every dtype, and no kernel computes them.
GUARD, UNWRITTEN, PAD = 12288.0, -20480.0, 64


class Recorded(NamedTuple):
    """A launch, and the names of the tensors that it filled."""

    launch: Launch
    written: list[str]


def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that a value that no kernel writes shows up."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            x = allocate(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def patch_language_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Triton's interpreter twice as fast.

    It replaces the functions of triton.language when a kernel starts, and again at each call
    of a function inside the kernel, where they are already replaced.
    """
    from triton.runtime import interpreter

    language = interpreter.tl
    patch = interpreter._patch_lang

    def patch_once(fn):
        modules = (x for x in fn.__globals__.values() if x is language or x is language.core)
        if any(language.core.is_builtin(module.load) for module in modules):
            return patch(fn)
        return interpreter._LangPatchScope()

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)


def guard_launches(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Check each launch from now on for writes out of bounds and for gaps.

    A launch gets every float tensor that is all NaN (see `poison_fresh_memory`) between
    guard values, which must survive, and must write all of it.

    Returns:
        The list to which each launch is added.
    """
    recorded: list[Recorded] = []
    run_launch = Launch.run

    def run(self: Launch, like: torch.Tensor) -> None:
        # The combine reads rows and weights that may be NaN, and writes only rows with a slot.
        inputs = ("routed_ptr", "weights_ptr") if "routed_ptr" in self.args else ()
        buffers, inside = {}, {}
        for name, value in self.args.items():
            fresh = isinstance(value, torch.Tensor) and value.numel() and value.isnan().all()
            if fresh and name not in inputs:
                buffers[name] = torch.full((value.numel() + 2 * PAD,), GUARD, dtype=value.dtype)
                inside[name] = buffers[name][PAD:-PAD].view(value.shape).fill_(UNWRITTEN)
        recorded.append(Recorded(self, list(inside)))
        run_launch(self._replace(args=self.args | inside), like)
        for name, buffer in buffers.items():
            assert (buffer[:PAD] == GUARD).all() and (buffer[-PAD:] == GUARD).all(), (
                f"{name} was written out of bounds"
            )
            assert name == "drouted_ptr" or (inside[name] != UNWRITTEN).all(), f"{name} has gaps"
            self.args[name].copy_(inside[name])

    monkeypatch.setattr(Launch, "run", run)
    return recorded
