"""Bytes that a step holds at once, counted from the tensors it makes, real or fake.

    with Live() as live:
        step()
    live.peak

counts each storage that any operator returns until the last tensor on it is gone. Under
torch's FakeTensorMode nothing is allocated, so that a model of any size is counted on
any machine (`step_memory`). What an operator allocates and frees within itself is not
seen but only known of a few (`scratch`), nor is what the allocator keeps for later, nor
a storage's growth by resize_. torch's own trackers were no choice: they refuse a module
that is called more than once.
"""

import itertools
import math
import weakref
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deeploop import backprop
from deeploop.backprop import Segment
from deeploop.config import Config, ModelConfig, TrainConfig
from deeploop.cost import DEVICES
from deeploop.fusion import backend
from deeploop.kernels import registry
from deeploop.lm import LoopLM
from deeploop.loss import CHUNK_BYTES
from deeploop.optim import adamw, clip_gradients, step_if_finite
from deeploop.roofline import GPU, Clock
from deeploop.visits import Stream

Kind = Literal["cpu", "cuda"]
Scratch = dict[Any, registry.Scratch]
DEVICE = torch.ops.prim.device.default  # asked of a fake tensor many times an operator


class Instant(NamedTuple):
    """Bytes that are live, as a line in the sequences of a micro-batch."""

    fixed: float
    each: float  # for every sequence
    gradients: float  # of those fixed

    def at(self, rows: int) -> float:
        return self.fixed + self.each * rows


class Live(TorchDispatchMode):
    """Counts the bytes of storages made inside it: `now`, and the most there were, `peak`.

    `unit`: a size of the micro-batch that divides no other size of the model. A tensor
    with a multiple of it among its sizes grows with the micro-batch, others do not, so
    that `instants`, one behind every operator, tell the peak at any size.
    `scratch`: by operator, the bytes it needs within itself beyond its results, a function
    of its arguments. `clock` sees every operator, too. `gradients` is the caller's to
    fill, by parameter.
    """

    def __init__(
        self, unit: int = 0, scratch: Scratch | None = None, clock: Clock | None = None
    ) -> None:
        super().__init__()
        self.unit, self.scratch, self.clock = unit, scratch or {}, clock
        self.now = self.peak = self.growing = 0
        self.known: set[int] = set()
        self.gradients: dict[int, int] = {}
        self.instants: list[Instant] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is DEVICE:
            return out
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        if self.unit:
            self.note(self.scratch[func](args) if func in self.scratch else 0)
        if self.clock is not None:
            self.clock.see(func, args, kwargs, out)
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch.compile leaves alone what runs inside a mode

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage, once, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        self.known.add(key)
        size = storage.nbytes()
        growing = size if self.unit and any(n % self.unit == 0 for n in tensor.shape) else 0
        self.now += size
        self.growing += growing
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key, size, growing)

    def note(self, scratch: int) -> None:
        """Keep this instant; what an operator needs within itself grows with the batch."""
        each = (self.growing + scratch) / self.unit
        fixed = self.now - self.growing
        self.instants.append(Instant(fixed, each, sum(self.gradients.values())))

    def _free(self, key: int, size: int, growing: int) -> None:
        self.known.discard(key)
        self.now -= size
        self.growing -= growing


class Held(NamedTuple):
    """Bytes at a step's peak."""

    weights: float  # float32 parameters, and buffers
    moments: float  # AdamW's two
    gradients: float  # those there at the peak
    activations: float  # all else: what backward needs, tokens, temporary tensors

    @property
    def peak(self) -> float:
        return sum(self)


class StepMemory(NamedTuple):
    """The memory of a step whatever its micro-batch."""

    weights: int
    moments: int
    instants: list[Instant]
    waiting: float  # bytes a sequence that another micro-batch keeps between segments
    batch: int

    def held(self, rows: int) -> Held:
        """At the peak, with micro-batches of so many sequences."""
        top = max(self.instants, key=lambda instant: instant.at(rows))
        waiting = self.waiting * max(0, self.batch - rows)
        others = self.weights + self.moments + top.gradients
        return Held(self.weights, self.moments, top.gradients, top.at(rows) + waiting - others)


def step_memory(
    config: Config, kind: Kind = "cuda", clock: Clock | None = None, exact: bool = False
) -> StepMemory:
    """Bytes of a training step, from its second step on; none allocated.

    Of one process, with the run's plan and precision ("auto" is fp32). One micro-batch
    runs, of a size near the run's that `Live` can tell apart, and stands for all: of an
    accumulated batch, one that finds the gradients of those before it. With a step per
    segment the others keep their stream and global memory between segments. Of segments
    that are alike one runs. `clock` counts them all, in proportion to the sequences.
    `kind` is whose operators run: the chunks of their loss, and what they need within
    themselves. `exact` runs the run's own size of micro-batch, and then holds for no other.
    """
    t, m = config.train, config.model
    rows = t.micro_batch or t.batch_size
    chunk = chunk_rows(m, kind)
    unit = rows if exact else telling(rows, m, chunk)
    micros, share = math.ceil(t.batch_size / rows), rows / unit
    plan = backprop.segments(t, m.loops)
    stepping = t.step_per == "segment"
    with FakeTensorMode(), Live(unit, registry.scratch(kind)) as live:
        model = LoopLM(m)
        spells = clock or Clock(DEVICES["h200"], GPU, m.vocab_size)  # whose seconds nobody reads
        if t.compile:
            torch.compiler.reset()  # past eight shapes or clocks it would run eagerly instead
            for sublayer in model.sublayers:
                sublayer.branch.compile(backend=backend(spells), dynamic=False, fullgraph=True)
        optimizer = adamw(model, t)
        weights = live.now
        fill_gradients(model, live)
        step(model, optimizer, t, live)  # makes the moments
        moments = live.now - weights
        watch_gradients(model, live)
        x, y = torch.zeros(2, unit, m.seq_len, dtype=torch.int64)
        carried: Stream | None = None
        live.instants.clear()
        live.clock = clock
        alike = distinct(plan)
        for segment, times in alike:
            if micros > 1:
                fill_gradients(model, live)
            with spells.spell(times * micros, share):
                piece = backprop.backward(model, config, segment, x, y, carried, None, chunk)
            carried = piece.carried
            del piece
            if stepping or segment is alike[-1][0]:
                with spells.spell(times if stepping else 1, part="optimizer"):
                    step(model, optimizer, t, live)
        waits = stepping and len(plan) > 1
        waiting = 16 * m.seq_len + (size_of(carried) / unit if waits else 0)
    return StepMemory(weights, moments, live.instants, waiting, t.batch_size)


def chunk_rows(m: ModelConfig, kind: Kind) -> int:
    """Rows of logits alive at once."""
    return max(1, CHUNK_BYTES[kind] // (4 * m.vocab_size))


def few_chunks(config: Config, kind: Kind) -> bool:
    """Whether the loss has so few chunks that their number tells on the step's memory.

    With one chunk logits grow with the micro-batch, from about four on they do not.
    """
    m, rows = config.model, config.train.micro_batch or config.train.batch_size
    chunk = chunk_rows(m, kind)
    one = telling(rows, m, chunk) * m.seq_len <= chunk
    return not one and rows * m.seq_len < 4 * chunk


def telling(rows: int, m: ModelConfig, chunk: int) -> int:
    """A prime from `rows` on that divides no other size than the micro-batch's."""
    others = {
        m.d_model, m.ff_width, m.n_heads, m.vocab_size, m.seq_len, m.moe.experts, m.moe.top_k,
        m.moe.d_expert or m.d_model, m.moe.shared, chunk,
    }  # fmt: skip
    for n in itertools.count(max(rows, 5)):
        prime = all(n % k for k in range(2, math.isqrt(n) + 1))
        rest = n * m.seq_len % chunk if n * m.seq_len > chunk else 1  # rows of the last chunk
        if prime and (not rest or rest % n) and all(size % n for size in others if size):
            return n
    raise AssertionError("there are primes without end")


def distinct(plan: list[Segment]) -> list[tuple[Segment, int]]:
    """A plan's segments, each with how many it stands for.

    Behind the first all are alike but a shorter last one, and the second stands for them.
    """
    if len(plan) < 3:
        return [(segment, 1) for segment in plan]
    first, second, last = plan[0], plan[1], plan[-1]
    short = len(last.loops) < len(second.loops)
    found = [(first, 1), (second, len(plan) - 1 - short)]
    return [*found, (last, 1)] if short else found


def step(model: LoopLM, optimizer: torch.optim.AdamW, t: TrainConfig, live: Live) -> None:
    """The optimizer's step as the trainer takes it."""
    step_if_finite(optimizer, clip_gradients(model, t.clip), t.lr)
    optimizer.zero_grad(set_to_none=True)
    live.gradients.clear()


def fill_gradients(model: LoopLM, live: Live) -> None:
    """The gradients that a micro-batch finds of those before it."""
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
            live.gradients[id(p)] = p.nbytes


def watch_gradients(model: LoopLM, live: Live) -> None:
    """Tell `live` the size of each gradient once it is there."""

    def note(p: Tensor) -> None:
        live.gradients[id(p)] = p.nbytes

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)


def size_of(s: Stream | None) -> int:
    """Bytes of a stream that crosses a segment boundary."""
    return sum(x.nbytes for x in s or () if isinstance(x, Tensor))
