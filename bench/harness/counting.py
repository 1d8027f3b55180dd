"""Bytes that a computation moves, counted from the operations it executes.

While `count()` is open, two kinds of step are recorded, in order:

* a Triton kernel under Triton's interpreter (TRITON_INTERPRET=1, set before the process imports
  Triton): every lane of every executed load and store, with its address. `requested` bytes count
  a lane each time; `unique` bytes count an address once for each launch and direction, which is
  what memory delivers if caches catch every repeated read. A lane outside the tensors of the
  launch raises, so the counter also checks bounds.
* an ATen operator: its input tensors read once, its outputs (and inputs changed in place) written
  once; views and allocations are free. This is the best case of eager code, so the count favours
  the baselines.

Inside an operator of this package its Triton launches and the ATen calls beside them count
(copies of strided inputs, the final sum over partial results). On a GPU its launches cannot be
seen: `count(opened=False)` takes it for one operator that reads its inputs and writes its
outputs once.

An ATen operator's FLOPs are those of a matrix product, or one operation for each element of its
largest tensor if it does arithmetic; those of a Triton kernel are not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from deeploop.kernels._launch import interpreting

READ, WRITE = 0, 1
# Make or name memory, without touching its values.
ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach")
# Write their first argument, or copy its shape, without reading its values.
OVERWRITES = ("fill_", "zero_", "copy_", "zeros_like", "ones_like", "full_like", "new_zeros")
# Operations for each element, by name without _foreach_ and the _ of in-place forms.
ARITHMETIC = {
    "add": 1, "sub": 1, "rsub": 1, "mul": 1, "div": 1, "neg": 1, "pow": 1, "square": 1, "sqrt": 1,
    "rsqrt": 1, "reciprocal": 1, "exp": 1, "log": 1, "sigmoid": 1, "sum": 1, "mean": 1,
    "lerp": 3, "addcmul": 3, "addcdiv": 3, "linalg_vector_norm": 2, "norm": 2,
}  # fmt: skip


class Moved(NamedTuple):
    """Bytes of one tensor in one step."""

    name: str
    shape: tuple[int, ...]
    read: int
    written: int
    read_requested: int  # counting repeated reads of an address
    written_requested: int

    @property
    def unique(self) -> int:
        return self.read + self.written

    @property
    def requested(self) -> int:
        return self.read_requested + self.written_requested


class Step(NamedTuple):
    """One kernel launch or one ATen operator."""

    name: str
    kernel: bool  # a Triton launch
    moved: list[Moved]
    flops: int = 0

    @property
    def unique(self) -> int:
        return sum(m.unique for m in self.moved)

    @property
    def requested(self) -> int:
        return sum(m.requested for m in self.moved)


@contextlib.contextmanager
def count(opened: bool = True) -> Iterator[list[Step]]:
    """Record the steps executed inside, with Triton launches if the interpreter is on."""
    steps: list[Step] = []
    with contextlib.ExitStack() as stack:
        if interpreting():
            stack.enter_context(_counted_launches(steps))
        stack.enter_context(_AtenCounter(steps, opened))
        yield steps


# ---------------------------------------------------------------------------
# Triton launches


class _Memory:
    """The storages of a launch's tensors, and the bytes of them that it touched."""

    def __init__(self, tensors: dict[str, Tensor]):
        self.tensors = tensors
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors.values()}
        storages.pop(0, None)  # of tensors without elements
        self.starts = np.array(sorted(storages), dtype=np.uint64)
        self.touched = [np.zeros((2, storages[int(s)].nbytes()), dtype=bool) for s in self.starts]
        self.requested = [[0, 0] for _ in self.starts]

    def touch(self, direction: int, addresses: Any, itemsize: int) -> None:
        """Mark the bytes of some addresses; raises IndexError for one outside every tensor."""
        addresses = addresses.reshape(-1)
        while addresses.size:
            i = int(np.searchsorted(self.starts, addresses[0], side="right")) - 1
            if i < 0:
                raise IndexError(f"{self._outside(direction)} below every tensor")
            offsets = (addresses - self.starts[i]).astype(np.int64)
            touched = self.touched[i][direction]
            inside = (offsets >= 0) & (offsets + itemsize <= touched.size)
            if not inside[0]:
                problem = f"{offsets[0]} bytes into {touched.size}"
                raise IndexError(f"{self._outside(direction)} {problem}")
            for byte in range(itemsize):
                touched[offsets[inside] + byte] = True
            self.requested[i][direction] += int(inside.sum()) * itemsize
            addresses = addresses[~inside]

    def _outside(self, direction: int) -> str:
        return f"a {'store' if direction else 'load'} outside {', '.join(self.tensors)}:"

    def moved(self) -> list[Moved]:
        """List each storage's bytes, under the names of all arguments that share it."""
        result = []
        for start, touched, requested in zip(
            self.starts, self.touched, self.requested, strict=True
        ):
            here = {
                name: x
                for name, x in self.tensors.items()
                if x.untyped_storage().data_ptr() == int(start)
            }
            shape = max((tuple(x.shape) for x in here.values()), key=lambda s: (np.prod(s), s))
            read, written = (int(touched[way].sum()) for way in (READ, WRITE))
            if read or written:
                result.append(Moved("=".join(here), shape, read, written, *requested))
        return result


@contextlib.contextmanager
def _counted_launches(steps: list[Step]) -> Iterator[None]:
    """Replace the interpreter's executor and builder methods by counting ones, for a while."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder
    launches: list[_Memory] = []

    class Executor(interpreter.GridExecutor):
        def __call__(self, *args: Any, **kwargs: Any) -> None:
            named = dict(zip(self.arg_names, args, strict=False)) | kwargs
            tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
            launches.append(_Memory(tensors))
            try:
                # The interpreter's own tensor handling is not the kernel's traffic.
                with _disable_current_modes(), np.errstate(all="ignore"):
                    super().__call__(*args, **kwargs)
            finally:
                memory = launches.pop()
            steps.append(Step(self.fn.__name__, True, memory.moved()))

    def counted(method: str, directions: tuple[int, ...], pointer: int, mask: int) -> Any:
        original = getattr(builder, method)

        def run(*args: Any) -> Any:
            pointers, active = args[pointer], args[mask].data if mask else True
            # The interpreter keeps some masks as integers; those would index, not select.
            active = np.broadcast_to(active, pointers.data.shape).astype(bool)
            itemsize = pointers.get_element_ty().primitive_bitwidth // 8
            for direction in directions:
                launches[-1].touch(direction, pointers.data[active], itemsize)
            return original(*args)

        return run

    # Unmasked and descriptor accesses go through the masked ones.
    patches = {
        "create_masked_load": counted("create_masked_load", (READ,), 0, 1),
        "create_masked_store": counted("create_masked_store", (WRITE,), 0, 2),
        "create_atomic_rmw": counted("create_atomic_rmw", (READ, WRITE), 1, 3),
        "create_atomic_cas": counted("create_atomic_cas", (READ, WRITE), 0, 0),
    }
    plain, convert = interpreter.GridExecutor, interpreter._implicit_cvt

    def as_launched(value: Any) -> Any:
        """Round a float argument to float32 as a launch does; the interpreter does not."""
        if not isinstance(value, float):
            return convert(value)
        kind = interpreter.tl.float32
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), kind)
        return interpreter.tl.tensor(handle, kind)

    interpreter.GridExecutor, interpreter._implicit_cvt = Executor, as_launched
    vars(builder).update(patches)
    try:
        yield
    finally:
        interpreter.GridExecutor, interpreter._implicit_cvt = plain, convert
        for method in patches:
            delattr(builder, method)


# ---------------------------------------------------------------------------
# ATen operators


def distinct_bytes(x: Tensor) -> int:
    """Count the bytes of a tensor's values; an expanded dimension counts once."""
    sizes = [
        size if stride else min(size, 1) for size, stride in zip(x.shape, x.stride(), strict=True)
    ]
    return int(np.prod(sizes, dtype=np.int64)) * x.element_size()


class _AtenCounter(TorchDispatchMode):
    def __init__(self, steps: list[Step], opened: bool):
        super().__init__()
        self.steps, self.opened = steps, opened

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "deeploop" and self.opened:
            # A mode does not see inside a custom op; the plain function under it does.
            from torch._library.custom_ops import OPDEFS

            with self:
                return OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in ALLOCATIONS or "alias" in name or name.startswith("set_"):
            return result
        moved = self._moved(func, name, args, kwargs, result)
        if moved:
            flops = _flops(func.overloadpacket, args, kwargs, result)
            self.steps.append(Step(str(func), False, moved, flops))
        return result

    def _moved(self, func, name, args, kwargs, result) -> list[Moved]:
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        changed = {
            a.name
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        }
        moved, storages = [], set()
        for key, value in given.items():
            for x in _tensors(value):
                storages.add(x.untyped_storage().data_ptr())
                size = distinct_bytes(x)
                unseen = key == "out" or (key == "self" and name in OVERWRITES)
                read, written = 0 if unseen else size, size if key in changed else 0
                moved.append(Moved(key, tuple(x.shape), read, written, read, written))
        for x in _tensors(result):
            # What shares memory with an input is a view of it, or was counted as changed.
            if x.untyped_storage().data_ptr() not in storages:
                size = distinct_bytes(x)
                moved.append(Moved("result", tuple(x.shape), 0, size, 0, size))
        aliases_only = not changed and not any(m.written for m in moved)
        return [] if aliases_only else [m for m in moved if m.unique]


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=result))
    each = ARITHMETIC.get(packet.__name__.removeprefix("_foreach_").rstrip("_"), 0)
    if not each:
        return 0
    return each * max(sum(x.numel() for x in _tensors(value)) for value in (*args, result))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [x for item in value for x in _tensors(item)]
    return []
