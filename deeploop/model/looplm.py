"""LoopLM: a causal language model whose blocks run many times over.

Sources: DeepLoop, arXiv 2607.13491 (Eq. 3.1); LOOM, arXiv 2610.01153; the pre-norm
baseline is the same loop with h + f and no scaling. All but LOOM norm the embedding
and tie the head to it.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig, Recompute
from deeploop.model.attention import Attention, AttentionContext, rope_tables
from deeploop.model.init import init_weights
from deeploop.model.kv.cache import KVCache, check_cache
from deeploop.model.mlp import SwiGLU
from deeploop.model.moe.layer import MoE
from deeploop.model.recompute import Watch, again
from deeploop.model.visits import LoopState, Sublayer, Visit, open_loop, update, walk
from deeploop.utils.device import autocast_dtype
from deeploop.utils.errors import InputError
from deeploop.utils.spans import span


class LoopLM(nn.Module):
    """Embedding, R loops over K blocks, head.

    `forward` returns the final normalised states, not logits, so that a loss
    can fuse the head (`deeploop.model.loss`); `logits` applies the head.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        d, loom = config.d_model, config.residual == "loom"
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
        carried: LoopState | None = None,
        *,
        cache: KVCache | None = None,
        watch: Watch | None = None,
        recompute: Recompute = "none",
    ) -> LoopState:
        """Some loops of the walk, from what the loops before them left (see `visits.cut`).

        The stream's n is the final norm of its h. `recompute` keeps nothing of each visit
        or loop but its inputs, and runs it again in backward; experts are not chosen again.
        """
        with span("embedding"):
            x = self.embed(tokens)
            dtype = autocast_dtype(x)
            cos, sin = self.rope(tokens, cache, dtype)
        c, gain = self.config, self.sublayers[0].gain_in

        def visit_one(s: LoopState, visit: Visit, watch: Watch | None) -> LoopState:
            assert s.n is not None
            place = AttentionContext(
                cos, sin, visit.loop * c.n_layers + visit.sublayer_index // 2, cache
            )
            with span(visit.part):
                f = visit.branch(s.n, place)
            with span("updates"):
                s = update(c, s, f, visit)
            if watch is not None:
                watch(visit, s.h)
            return s

        def loop_once(s: LoopState, loop: int, watch: Watch | None) -> LoopState:
            with span("updates"):
                s = open_loop(c, s, x, loop, gain, dtype)
            for visit in walk(c, self.sublayers, loop, loop + 1 == loops.stop, self.gain_final):
                s = again(visit_one, recompute == "visit")(s, visit, watch)
            return s

        s = LoopState(x) if carried is None else carried
        for loop in loops:
            s = again(loop_once, recompute == "loop")(s, loop, watch)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return s

    def embed(self, tokens: Tensor) -> Tensor:
        """The stream at the start [B, T, d_model], float32: of mean square 1 at initialisation."""
        x = self.embedding(tokens)
        if self.config.residual == "loom":
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


def count_parameters(model: nn.Module) -> int:
    """Parameters in distinct storages: weights shared by visits count once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    sizes = {p.untyped_storage().data_ptr(): p.element_size() for p in model.parameters()}
    return sum(s.nbytes() // sizes[ptr] for ptr, s in storages.items())
