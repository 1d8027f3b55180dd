"""LoopLM: a causal language model whose blocks run many times over.

Sources: DeepLoop, arXiv 2607.13491 (Eq. 3.1); LOOM, arXiv 2610.01153; the pre-norm
baseline is the same loop with h + f and no scaling. All but LOOM norm the embedding
and tie the head to it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from deeploop.cache import KVCache
from deeploop.config import ModelConfig, Recompute
from deeploop.device import autocast_dtype
from deeploop.errors import InputError
from deeploop.layers import Attention, Place, SwiGLU, rope_tables
from deeploop.moe import MoE, copy_router
from deeploop.spans import span
from deeploop.visits import Stream, Sublayer, Visit, open_loop, update, walk

Watch = Callable[[Visit, Tensor], None]


class LoopLM(nn.Module):
    """Embedding, R loops over K blocks, head.

    `forward` returns the final normalised states, not logits, so that a loss
    can fuse the head (`deeploop.loss`); `logits` applies the head.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        d, loom = config.d_model, config.arm == "loom"
        self.embedding = nn.Embedding(config.vocab_size, d)
        self.untied = nn.Linear(d, config.vocab_size, bias=False) if loom else None
        self.gain_embedding = None if loom else nn.Parameter(torch.ones(d))
        self.gain_final = None if loom else nn.Parameter(torch.ones(d))
        sublayers = []
        for _ in range(config.n_layers):
            attention = Attention(d, config.n_heads, config.qk_norm, config.norm_eps)
            sublayers += [Sublayer(attention, config), Sublayer(feed_forward(config), config)]
        self.sublayers: Sequence[Sublayer] = nn.ModuleList(sublayers)  # type: ignore[assignment]
        cos, sin = rope_tables(config.seq_len, d // config.n_heads, config.rope_base)
        self.register_buffer("cos", cos.float(), persistent=False)
        self.register_buffer("sin", sin.float(), persistent=False)
        init_weights(self)

    @property
    def head(self) -> Tensor:
        """The head's matrix [vocab_size, d_model]."""
        return self.embedding.weight if self.untied is None else self.untied.weight

    def forward(
        self,
        tokens: Tensor,
        loops: int | None = None,
        cache: KVCache | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        """tokens: int64 [B, T] -> final states [B, T, d_model], normalised.

        `loops` runs another number of loops than in training; alpha and gamma stay the
        training ones (LOOM's released code takes gamma of the new number), and loops past
        the last router take that one. `watch(visit, h)` sees the stream after each visit.
        """
        loops = self.config.loops if loops is None else loops
        if loops < 1:
            raise InputError(f"loops={loops}: needs at least one loop")
        if cache is not None:
            check_cache(cache, len(tokens), loops, self.config.n_layers)
        n = self.run(tokens, range(loops), cache=cache, watch=watch).n
        assert n is not None
        return n

    def run(
        self,
        tokens: Tensor,
        loops: range,
        carried: Stream | None = None,
        *,
        cache: KVCache | None = None,
        watch: Watch | None = None,
        recompute: Recompute = "none",
    ) -> Stream:
        """Some loops of the walk, from what the loops before them left (see `visits.cut`).

        The stream's n is the final norm of its h. `recompute` keeps nothing of each visit
        or loop but its inputs, and runs it again in backward; experts are not chosen again.
        """
        with span("embedding"):
            x = self.embed(tokens)
            dtype = autocast_dtype(x)
            cos, sin = self.rope(tokens, cache, dtype)
        c, gain = self.config, self.sublayers[0].gain_in

        def visit_one(s: Stream, visit: Visit, watch: Watch | None) -> Stream:
            assert s.n is not None
            place = Place(cos, sin, visit.loop * c.n_layers + visit.physical // 2, cache)
            with span(visit.part):
                f = visit.branch(s.n, place)
            with span("updates"):
                s = update(c, s, f, visit)
            if watch is not None:
                watch(visit, s.h)
            return s

        def loop_once(s: Stream, loop: int, watch: Watch | None) -> Stream:
            with span("updates"):
                s = open_loop(c, s, x, loop, gain, dtype)
            for visit in walk(c, self.sublayers, loop, loop + 1 == loops.stop, self.gain_final):
                s = again(visit_one, recompute == "visit")(s, visit, watch)
            return s

        s = Stream(x) if carried is None else carried
        for loop in loops:
            s = again(loop_once, recompute == "loop")(s, loop, watch)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return s

    def embed(self, tokens: Tensor) -> Tensor:
        """The stream at the start [B, T, d_model], float32: of mean square 1 at initialisation."""
        x = self.embedding(tokens)
        if self.config.arm == "loom":
            return x / self.config.embed_std
        return F.rms_norm(x, x.shape[-1:], self.gain_embedding, self.config.norm_eps)

    def rope(
        self, tokens: Tensor, cache: KVCache | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Rows of the RoPE tables for these tokens' positions, in the branches' dtype."""
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        limit = self.config.seq_len if cache is None else cache.max_len
        if end > limit:
            raise InputError(f"tokens: {end} positions, but the model was built for {limit}")
        return self.cos[start:end].to(dtype), self.sin[start:end].to(dtype)

    def logits(self, n: Tensor) -> Tensor:
        """Final states [..., d_model] -> logits [..., vocab_size]."""
        return F.linear(n, self.head)

    def new_cache(self, batch: int, max_len: int, loops: int | None = None) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_len` tokens."""
        c = self.config
        slots = c.n_layers * (c.loops if loops is None else loops)
        head_dim = c.d_model // c.n_heads
        return KVCache(slots, batch, c.n_heads, max_len, head_dim, like=self.embedding.weight)


def check_cache(cache: KVCache, batch: int, loops: int, n_layers: int) -> None:
    """Refuse a cache of other sizes, or filled by another number of loops."""
    if loops * n_layers > cache.slots:
        raise InputError(
            f"loops={loops}: the cache has {cache.slots} slots, one a loop and layer; make it "
            f"with new_cache(..., loops={loops})"
        )
    if batch != cache.kv.shape[2]:
        raise InputError(f"tokens: {batch} sequences, but the cache is for {cache.kv.shape[2]}")
    if cache.length and cache.loops != loops:
        raise InputError(
            f"loops={loops}: the cache was filled by {cache.loops} loops; go on with those"
        )
    cache.loops = loops


def feed_forward(config: ModelConfig) -> SwiGLU | MoE:
    """The second sublayer of a block: experts where the model has any."""
    m, d = config.moe, config.d_model
    if not m.experts:
        return SwiGLU(d, config.ff_width)
    return MoE(
        d,
        n_experts=m.experts,
        top_k=m.top_k,
        d_expert=m.d_expert or d,
        n_shared=m.shared,
        n_routers=config.loops if m.router_per_loop else 1,
        capacity_factor=m.capacity_factor,
        backend=m.backend,
    )


def again(piece: Callable[..., Stream], wanted: bool) -> Callable[..., Stream]:
    """`piece(stream, where, watch)`, run once more in backward if wanted.

    What the router chose is kept, so that no token changes experts in between; watch
    sees the first run only.
    """
    if not wanted:
        return piece

    def run(s: Stream, where: object, watch: Watch | None) -> Stream:
        runs = itertools.count()

        def body(s: Stream) -> Stream:
            return piece(s, where, watch if next(runs) == 0 else None)

        return checkpoint(
            body, s, use_reentrant=False, preserve_rng_state=False, context_fn=_keep_routing
        )

    return run


def _keep_routing() -> tuple[AbstractContextManager, AbstractContextManager]:
    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = op is torch.ops.deeploop.sigmoid_router.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@torch.no_grad()
def init_weights(model: LoopLM) -> None:
    """Xavier-normal matrices, with gain beta on V, O and the FFN, never on Q and K.

    beta acts here and only here. The matrices it scales and the Xavier base are
    DeepNet's (arXiv 2203.00555): what DeepLoop and LOOM start from they leave unstated.
    Norm gains start at 1, the embedding at `embed_std`, an untied head and the first loop's
    router at d_model^-1/2, the routers of the other loops as copies of it (LOOM's released
    code; its experts would else starve in late loops).
    """
    config = model.config
    nn.init.normal_(model.embedding.weight, std=config.embed_std)
    if model.untied is not None:
        nn.init.normal_(model.untied.weight, std=config.d_model**-0.5)
    for sublayer in model.sublayers:
        branch = sublayer.branch
        if isinstance(branch, Attention):
            for matrix, gain in zip(
                branch.qkv.weight.chunk(3), (1.0, 1.0, config.beta), strict=True
            ):
                _xavier_(matrix, config.d_model, config.d_model, gain)
            _xavier_(branch.out.weight, config.d_model, config.d_model, config.beta)
        elif isinstance(branch, SwiGLU):
            _swiglu_(branch.gate_up.weight, branch.out.weight, config.ff_width, config)
        else:
            width = branch.down.shape[2]  # of the shared experts, too, though they are one SwiGLU
            _swiglu_(branch.gate_up, branch.down, width, config)
            if branch.shared is not None:
                _swiglu_(branch.shared.gate_up.weight, branch.shared.out.weight, width, config)
            for router in branch.routers:
                router.normal_(std=config.d_model**-0.5)
            if config.moe.router_copied:
                copy_router(branch)


def _swiglu_(gate_up: Tensor, down: Tensor, width: int, config: ModelConfig) -> None:
    for matrix in (gate_up, down):
        _xavier_(matrix, config.d_model, width, config.beta)


def _xavier_(matrix: Tensor, fan_in: int, fan_out: int, gain: float) -> None:
    matrix.normal_(std=gain * math.sqrt(2 / (fan_in + fan_out)))


def count_parameters(model: nn.Module) -> int:
    """Parameters in distinct storages: weights shared by visits count once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    sizes = {p.untyped_storage().data_ptr(): p.element_size() for p in model.parameters()}
    return sum(s.nbytes() // sizes[ptr] for ptr, s in storages.items())
