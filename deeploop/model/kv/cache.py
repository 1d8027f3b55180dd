"""Keys and values of past tokens: one preallocated slot per (loop, attention layer)."""

import torch
from torch import Tensor

from deeploop.utils.errors import InputError


class KVCache:
    """Past keys and values, one slot a visit, so that cache on equals cache off.

    A looped model visits the same layer with other inputs in every loop; one
    slot per sublayer_index layer would let a later loop overwrite an earlier one.

    Shapes: keys and values are [slots, B, heads, max_len, head_dim].
    """

    def __init__(
        self, slots: int, batch: int, heads: int, max_len: int, head_dim: int, like: Tensor
    ):
        shape = (2, slots, batch, heads, max_len, head_dim)
        self.kv = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.length = 0
        self.loops: int | None = None  # of the chunks stored so far

    @property
    def slots(self) -> int:
        return self.kv.shape[1]

    @property
    def max_len(self) -> int:
        return self.kv.shape[4]

    def append(self, slot: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, heads, T, head_dim] behind the past; return past and new."""
        end = self.length + k.shape[2]
        self.kv[0, slot, :, :, self.length : end] = k
        self.kv[1, slot, :, :, self.length : end] = v
        return self.kv[0, slot, :, :, :end], self.kv[1, slot, :, :, :end]

    def mask(self, new: int, device: torch.device) -> Tensor | None:
        """Causal mask [new, length + new] of a chunk behind a past; None where not needed."""
        if self.length == 0 or new == 1:
            return None
        past = torch.ones(new, self.length + new, dtype=torch.bool, device=device)
        return past.tril(self.length)

    def advance(self, new: int) -> None:
        """Count `new` tokens as past, once every visit has stored them."""
        self.length += new


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
