"""Count the bytes that a step has live at once, from the tensors it makes, real or fake.

    with LiveBytes() as live:
        step()
    live.peak

counts each storage that an operator returns until the last tensor on it is freed. Under
torch's FakeTensorMode nothing is allocated, so that a model of any size can be counted on any
machine (`step_memory`). Three things are not seen: memory that an operator allocates and frees
itself (a table has it for some, `scratch`), memory that the allocator keeps for later, and a
storage's growth by resize_. torch's own trackers cannot be used: they refuse a module that is
called more than once.
"""

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deeploop.analyze.plan.fusion import backend
from deeploop.analyze.plan.hardware import DEVICES
from deeploop.analyze.plan.roofline import GPU, Clock
from deeploop.config import Config, ModelConfig
from deeploop.config.backprop import Segment, segments
from deeploop.kernels import registry
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import CHUNK_BYTES
from deeploop.model.state import Draws
from deeploop.train.backprop import MicroBatch
from deeploop.train.optim import make_optimizer
from deeploop.train.step import apply_gradients, train_step
from deeploop.utils.device import autocast

Kind = Literal["cpu", "cuda"]
Scratch = dict[Any, registry.Scratch]
DEVICE = torch.ops.prim.device.default  # fake tensors call it many times an operator


class Instant(NamedTuple):
    """Bytes that are live after an operator: a linear function of a micro-batch's sequences."""

    fixed: float
    per_sequence: float
    gradients: float  # included in `fixed`

    def at(self, sequences: int) -> float:
        """Return the bytes with micro-batches of so many sequences."""
        return self.fixed + self.per_sequence * sequences


class LiveBytes(TorchDispatchMode):
    """Count the bytes of storages made inside: `now` those live, `peak` the most so far.

    Args:
        unit: a micro-batch size that divides no other size of the model. A tensor with a
            multiple of it among its sizes grows with the micro-batch and others do not, so
            that `instants`, one after every operator, give the peak at any size.
        scratch: by operator, a function of its arguments that returns the bytes it allocates
            and frees itself.
        clock: also counts each operator's seconds.

    Attributes:
        gradients: bytes by the id of a parameter; the caller fills it in.
    """

    def __init__(
        self, unit: int = 0, scratch: Scratch | None = None, clock: Clock | None = None
    ) -> None:
        super().__init__()
        self.unit, self.scratch, self.clock = unit, scratch or {}, clock
        self.now = self.peak = self.growing = 0
        self.paused = False  # while True, new storages are not counted
        self.known: set[int] = set()
        self.gradients: dict[int, int] = {}
        self.instants: list[Instant] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is DEVICE or self.paused:
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
        """Count a tensor's storage until it is freed; one that is counted already is left out."""
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
        """Record an instant; an operator's `scratch` bytes grow with the micro-batch."""
        per_sequence = (self.growing + scratch) / self.unit
        fixed = self.now - self.growing
        self.instants.append(Instant(fixed, per_sequence, sum(self.gradients.values())))

    def _free(self, key: int, size: int, growing: int) -> None:
        self.known.discard(key)
        self.now -= size
        self.growing -= growing


class PeakBytes(NamedTuple):
    """Bytes at a step's peak."""

    weights: float  # float32 parameters, and buffers
    moments: float  # AdamW's two
    gradients: float  # those that exist at the peak
    activations: float  # the rest: saved for backward, tokens, temporary tensors

    @property
    def peak(self) -> float:
        """Sum of all."""
        return sum(self)


class StepMemory(NamedTuple):
    """Bytes of a step as a function of its micro-batch."""

    weights: int
    moments: int
    instants: list[Instant]
    waiting: float  # bytes that a sequence of another micro-batch keeps between segments
    batch: int  # sequences

    def at(self, sequences: int) -> PeakBytes:
        """Return the bytes at the peak, with micro-batches of so many sequences."""
        top = max(self.instants, key=lambda instant: instant.at(sequences))
        waiting = self.waiting * max(0, self.batch - sequences)
        others = self.weights + self.moments + top.gradients
        activations = top.at(sequences) + waiting - others
        return PeakBytes(self.weights, self.moments, top.gradients, activations)


def step_memory(
    config: Config,
    kind: Kind = "cuda",
    clock: Clock | None = None,
    exact: bool = False,
    step: int = 0,
) -> StepMemory:
    """Count the bytes of a training step of one process, from its second step on.

    Nothing is allocated. The step is the trainer's (`deeploop.train.step`) with one micro-batch,
    whose size is a prime near the real one (see `recognisable_batch`); with accumulation,
    gradients already exist when it starts. Of identical segments one is run. Precision
    "auto" counts as fp32.

    Args:
        config: the run.
        kind: the device whose operators run; it decides the chunks of the loss and the
            operators' temporary memory.
        clock: also counts the operators' seconds, in proportion to the sequences.
        exact: run the real size of micro-batch; the result is then valid for that size alone.
        step: of the run, counted from 0; where loops are drawn, they are those of this step.
    """
    config = config.replace("model.solver", tolerance=0.0)  # a fake residual cannot end a solver
    t, m = config.train, config.model
    sequences = t.micro_batch or t.batch_size
    chunk = chunk_rows(m, kind)
    unit = sequences if exact else recognisable_batch(sequences, m, chunk)
    listed = segments(t, m.loops, step)
    waits = t.step_per == "segment" and len(listed) > 1
    with FakeTensorMode(), LiveBytes(unit, registry.scratch(kind)) as live:
        model = LoopLM(m)
        optimizer = make_optimizer(model, t)
        weights = live.now
        fill_gradients(model, live)
        apply_gradients(model, optimizer, t.clip, t.lr)  # makes the moments
        live.gradients.clear()
        moments = live.now - weights
        x, y = torch.zeros(2, unit, m.seq_len, dtype=torch.int64)
        waiting = 16 * m.seq_len + (state_bytes(model, config, x) / unit if waits else 0)
        if t.compile:
            fused_clock = clock or Clock(DEVICES["h200"], GPU, m.vocab_size)
            torch.compiler.reset()  # past eight shapes or clocks it would run eagerly instead
            for sublayer in model.all_sublayers():
                compiler = backend(fused_clock)
                sublayer.branch.compile(backend=compiler, dynamic=False, fullgraph=True)
        record_gradients(model, live)
        live.instants.clear()
        each = t.loop_count_per == "sequence"
        draws = Draws(first_loops=torch.zeros(unit, dtype=torch.int64) if each else None)
        batch = MicroBatch(x, y, draws)
        simulate(model, optimizer, config, batch, dict(distinct(listed)), live, clock, chunk)
    return StepMemory(weights, moments, live.instants, waiting, t.batch_size)


def simulate(
    model: LoopLM,
    optimizer: torch.optim.Optimizer,
    config: Config,
    micro_batch: MicroBatch,
    times: dict[Segment, int],
    live: LiveBytes,
    clock: Clock | None,
    chunk: int,
) -> None:
    """Take the trainer's step on one micro-batch; each segment counts for `times` of them.

    Counted are the operators of segments and of optimizer steps, their bytes and seconds. Those
    of the step's metrics, a few KiB, are left out.
    """
    t = config.train
    sequences = t.micro_batch or t.batch_size
    micros, share = math.ceil(t.batch_size / sequences), sequences / len(micro_batch.tokens)
    per_segment = t.step_per == "segment"
    last = 1  # times of the segment that ran last

    @contextlib.contextmanager
    def counted(repeats: int, share: float = 1.0, component: str = "") -> Iterator[None]:
        live.paused, live.clock = False, clock
        with clock.repeat(repeats, share, component) if clock else contextlib.nullcontext():
            yield
        live.paused, live.clock = True, None

    @contextlib.contextmanager
    def around(segment: Segment | None) -> Iterator[None]:
        nonlocal last
        if segment is None:
            with counted(last if per_segment else 1, component="optimizer"):
                yield
            live.gradients.clear()
            return
        last = times[segment]
        if micros > 1:
            with counted(1):
                fill_gradients(model, live)
        with counted(last * micros, share):
            yield

    groups = [[s] for s in times] if per_segment else [list(times)]
    live.paused = True
    train_step(
        model, optimizer, config, [micro_batch], t.lr, groups=groups, around=around,
        chunk_rows=chunk,
    )  # fmt: skip


def state_bytes(model: LoopLM, config: Config, tokens: Tensor) -> int:
    """Return the bytes of the state that crosses a segment boundary."""
    with torch.no_grad(), autocast(tokens.device, config.train.precision):
        state = model.detach(model.run(tokens, range(1)))
    return sum(x.nbytes for x in tree_leaves(state) if isinstance(x, Tensor))


def chunk_rows(m: ModelConfig, kind: Kind) -> int:
    """Return how many rows of logits the loss has live at once."""
    return max(1, CHUNK_BYTES[kind] // (4 * m.vocab_size))


def few_chunks(config: Config, kind: Kind) -> bool:
    """Return whether the loss has between one and four chunks of logits.

    With one chunk the logits grow with the micro-batch, from about four on they do not; in
    between memory is not linear in the micro-batch.
    """
    m, sequences = config.model, config.train.micro_batch or config.train.batch_size
    chunk = chunk_rows(m, kind)
    one = recognisable_batch(sequences, m, chunk) * m.seq_len <= chunk
    return not one and sequences * m.seq_len < 4 * chunk


def recognisable_batch(sequences: int, m: ModelConfig, chunk: int) -> int:
    """Return the smallest prime batch size >= `sequences` that divides no size of the model.

    Sizes that grow with the batch can then be recognised.
    """
    others = {
        m.d_model, m.ff_width, m.n_heads, m.vocab_size, m.seq_len, m.moe.experts, m.moe.top_k,
        m.moe.d_expert or m.d_model, m.moe.shared, m.lora_rank, chunk,
    }  # fmt: skip
    for n in itertools.count(max(sequences, 5)):
        prime = all(n % k for k in range(2, math.isqrt(n) + 1))
        rest = n * m.seq_len % chunk if n * m.seq_len > chunk else 1  # rows of the last chunk
        if prime and (not rest or rest % n) and all(size % n for size in others if size):
            return n
    raise AssertionError("unreachable: there are infinitely many primes")


def distinct(listed: list[Segment]) -> list[tuple[Segment, int]]:
    """Return the segments that differ, each with the number of segments it stands for.

    Segments 2 .. n-1 of one that goes through all loops are identical, so only the second is
    simulated; a shorter last one differs.
    """
    if len(listed) < 3:
        return [(segment, 1) for segment in listed]
    first, second, last = listed[0], listed[1], listed[-1]
    short = len(last.loops) < len(second.loops)
    result = [(first, 1), (second, len(listed) - 1 - short)]
    return [*result, (last, 1)] if short else result


def fill_gradients(model: LoopLM, live: LiveBytes) -> None:
    """Give every parameter without a gradient one of zeros, as earlier micro-batches would."""
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
            live.gradients[id(p)] = p.nbytes


def record_gradients(model: LoopLM, live: LiveBytes) -> None:
    """Record in `live` the size of each gradient once backward has made it."""

    def note(p: Tensor) -> None:
        live.gradients[id(p)] = p.nbytes

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)
