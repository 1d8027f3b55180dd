"""Multi-head attention with rotary embeddings, on library GEMMs."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.model.kv.cache import KVCache, visible
from deeploop.model.lora import Adapters, adapted

KeysValues = tuple[Tensor, Tensor]  # each [B, heads, T, head_dim], with RoPE


class AttentionContext(NamedTuple):
    """Inputs of a visit's attention beside its normalised input."""

    cos: Tensor  # [T, 1, head_dim] or [B, T, 1, head_dim], for the positions of this input
    sin: Tensor  # as cos, first half negated
    loop: int | None = None  # counted from 0; None outside of the loops
    block: int = 0  # physical block: with the loop, it tells which keys and values to read
    cache: KVCache | None = None
    valid: Tensor | None = None  # bool [B, T], tokens whose keys others see; None: all
    kept: list[KeysValues] | None = None  # the keys and values are appended to it
    first: KeysValues | None = None  # of the first loop, to read in the place of its own
    mask: Tensor | None = None  # bool [B, 1, T, ...] over them; None: causal, up to their end
    causal: bool = True  # False: a token sees all of its sequence, without cache or mask


def rope_tables(seq_len: int, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cos and signed sin of rotary embeddings, each float64 [seq_len, 1, head_dim].

    Half-split convention: dimension i pairs with i + head_dim/2. The sign of
    the rotation is folded into sin, so that rotating is x*cos + roll(x)*sin.
    """
    inverse = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(seq_len, dtype=torch.float64)[:, None] * inverse
    cos, sin = angle.cos(), angle.sin()
    wide_cos = torch.cat((cos, cos), -1)[:, None]
    wide_sin = torch.cat((-sin, sin), -1)[:, None]
    return wide_cos, wide_sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to x [B, T, heads, head_dim] in x's dtype."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, -1), sin).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = True) -> Tensor:
    """Compute softmax attention over [B, heads, T, head_dim]; a mask stands for causal.

    By PyTorch's kernel, except for short bfloat16 sequences on a CPU, where two
    GEMMs and a softmax took 3.9 ms forward + backward against its
    13.2 ms (2 cores with AVX-512 BF16, [16, 4, 128, 32]).
    """
    T = q.shape[2]
    short = q.device.type == "cpu" and q.dtype == torch.bfloat16 and T <= 256
    if mask is not None or T == 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if not short:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    future = q.new_full((T, T), -torch.inf).triu(1) if causal else q.new_zeros(T, T)
    future = future.expand(q.shape[0] * q.shape[1], T, T)
    q3, k3, v3 = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(future, q3, k3.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v3).view(q.shape)


class Attention(nn.Module):
    """Multi-head attention with RoPE, causal or over all tokens; no biases, no dropout.

    Q, K and V are one matrix [3 * d_model, d_model], so one GEMM; only its V
    rows take the initialisation gain beta (see `deeploop.model.init`).
    """

    def __init__(self, d_model: int, n_heads: int, qk_norm: bool, eps: float):
        super().__init__()
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.qk_norm, self.eps = qk_norm, eps
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self, n: Tensor, context: AttentionContext, adapters: Adapters = (None, None)
    ) -> Tensor:
        """Map n [B, T, d_model] -> [B, T, d_model], with the adapters of this loop."""
        B, T, d = n.shape
        if context.first is not None:
            return self._read(n, context, adapters, *context.first)
        qkv = adapted(self.qkv, n, adapters[0]).view(B, T, 3 * self.n_heads, self.head_dim)
        qk, v = qkv.split((2 * self.n_heads, self.n_heads), dim=2)
        if self.qk_norm:
            qk = F.rms_norm(qk, (self.head_dim,), eps=self.eps).to(v.dtype)
        q, k = rotate(qk, context.cos, context.sin).transpose(1, 2).chunk(2, dim=1)
        v = v.transpose(1, 2)
        mask = None
        if context.cache is not None:
            k, v, mask = context.cache.update(context.loop, context.block, k, v, context.valid)
        elif context.valid is not None:
            mask = visible(context.valid, T)
        if context.kept is not None:
            context.kept.append((k, v))
        f = attend(q, k, v, mask, context.causal)
        return adapted(self.out, f.transpose(1, 2).reshape(B, T, d), adapters[1])

    def _read(
        self, n: Tensor, context: AttentionContext, adapters: Adapters, k: Tensor, v: Tensor
    ) -> Tensor:
        """Attend to other keys and values [B, heads, n, head_dim], with queries of n alone."""
        B, T, d = n.shape
        q = F.linear(n, self.qkv.weight[:d])
        if adapters[0] is not None:
            q = q + F.linear(F.linear(n, adapters[0].a), adapters[0].b[:d])
        q = q.view(B, T, self.n_heads, self.head_dim)
        if self.qk_norm:
            q = F.rms_norm(q, (self.head_dim,), eps=self.eps).to(v.dtype)
        q = rotate(q, context.cos, context.sin).transpose(1, 2)
        past, mask = k.shape[2] - T, context.mask
        if mask is None and past and T > 1:
            mask = torch.ones(T, past + T, dtype=torch.bool, device=q.device).tril(past)
        f = attend(q, k, v, mask).transpose(1, 2).reshape(B, T, d)
        return adapted(self.out, f, adapters[1])
