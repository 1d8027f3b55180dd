"""LoopLM: a causal language model whose blocks run many times over.

Source: DeepLoop, arXiv 2607.13491 (Eq. 3.1); the pre-norm baseline is the same
loop with h + f and no scaling. Both norm the embedding and tie the head to it.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.cache import KVCache
from deeploop.config import ModelConfig
from deeploop.errors import InputError
from deeploop.layers import Attention, Place, SwiGLU, rope_tables
from deeploop.visits import Sublayer, Visit, update, walk


class LoopLM(nn.Module):
    """Embedding, R loops over K blocks, tied head.

    `forward` returns the final normalised states, not logits, so that a loss
    can fuse the head (`deeploop.loss`); `logits` applies the head.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        d = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, d)
        self.gain_embedding = nn.Parameter(torch.ones(d))
        self.gain_final = nn.Parameter(torch.ones(d))
        sublayers = []
        for _ in range(config.n_layers):
            for branch in (
                Attention(d, config.n_heads, config.qk_norm, config.norm_eps),
                SwiGLU(d, config.ff_width),
            ):
                sublayers.append(Sublayer(branch, d, sandwich=config.arm != "baseline"))
        self.sublayers: Sequence[Sublayer] = nn.ModuleList(sublayers)  # type: ignore[assignment]
        cos, sin = rope_tables(config.seq_len, d // config.n_heads, config.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        init_weights(self)

    def forward(
        self,
        tokens: Tensor,
        loops: int | None = None,
        cache: KVCache | None = None,
        watch: Callable[[Visit, Tensor], None] | None = None,
    ) -> Tensor:
        """tokens: int64 [B, T] -> final states [B, T, d_model], normalised.

        `loops` runs another number of loops than in training; alpha stays the
        training one. `watch(visit, h)` sees the stream after each visit.
        """
        loops = self.config.loops if loops is None else loops
        if loops < 1:
            raise InputError(f"loops={loops}: needs at least one loop")
        h, n = self.enter(tokens)
        cos, sin = self.rope(tokens, cache, n.dtype)
        for visit in walk(self.sublayers, loops, self.gain_final):
            place = Place(cos, sin, visit.loop * self.config.n_layers + visit.physical // 2, cache)
            f = visit.sublayer.branch(n, place)
            h, n = update(self.config, h, f, visit)
            if watch is not None:
                watch(visit, h)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return n

    def enter(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Embed and norm: the stream h (float32) and the first visit's input n."""
        eps, shape = self.config.norm_eps, (self.config.d_model,)
        h = F.rms_norm(self.embedding(tokens), shape, self.gain_embedding, eps)
        n = F.rms_norm(h, shape, self.sublayers[0].gain_in, eps)
        device = tokens.device.type
        if torch.is_autocast_enabled(device):
            n = n.to(torch.get_autocast_dtype(device))
        return h, n

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
        """Final states [..., d_model] -> logits [..., vocab_size], head tied to the embedding."""
        return F.linear(n, self.embedding.weight)

    def new_cache(self, batch: int, max_len: int, loops: int | None = None) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_len` tokens."""
        c = self.config
        slots = c.n_layers * (c.loops if loops is None else loops)
        head_dim = c.d_model // c.n_heads
        return KVCache(slots, batch, c.n_heads, max_len, head_dim, like=self.embedding.weight)


@torch.no_grad()
def init_weights(model: LoopLM) -> None:
    """Xavier-normal matrices, with gain beta on V, O and the FFN, never on Q and K.

    beta acts here and only here. The matrices it scales and the Xavier base are
    DeepNet's (arXiv 2203.00555): what DeepLoop starts from it leaves unstated. Norm
    gains start at 1, the embedding at `embed_std`.
    """
    config = model.config
    nn.init.normal_(model.embedding.weight, std=config.embed_std)
    for sublayer in model.sublayers:
        branch = sublayer.branch
        if isinstance(branch, Attention):
            for matrix, gain in zip(
                branch.qkv.weight.chunk(3), (1.0, 1.0, config.beta), strict=True
            ):
                _xavier_(matrix, gain)
        else:
            for matrix in branch.gate_up.weight.chunk(2):
                _xavier_(matrix, config.beta)
        _xavier_(branch.out.weight, config.beta)


def _xavier_(matrix: Tensor, gain: float) -> None:
    fan_out, fan_in = matrix.shape
    matrix.normal_(std=gain * math.sqrt(2 / (fan_in + fan_out)))


def count_parameters(model: nn.Module) -> int:
    """Parameters in distinct storages: weights shared by visits count once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    sizes = {p.untyped_storage().data_ptr(): p.element_size() for p in model.parameters()}
    return sum(s.nbytes() // sizes[ptr] for ptr, s in storages.items())
