"""Keys and values of past tokens: one preallocated slot for each (loop, attention layer)."""

import torch
from torch import Tensor

from deeploop.config import ModelConfig
from deeploop.config.depth import key_loops
from deeploop.utils.errors import InputError


class KVCache:
    """Past keys and values, one slot a visit, so that cache on equals cache off.

    A looped model visits the same layer with other inputs in every loop; one slot per
    physical layer would let a later loop overwrite an earlier one.

    Args:
        config: the model's; its blocks before and after the loops have a slot each.
        batch: sequences.
        max_len: tokens of a sequence.
        loops: loops that will be run; None: as in training.
        like: a tensor of the cache's dtype and device.

    Attention calls `update` alone; the model calls `check` before a forward and `advance`
    after it.
    """

    def __init__(
        self, config: ModelConfig, batch: int, max_len: int, loops: int | None, *, like: Tensor
    ):
        loops = config.loops if loops is None else loops
        self.config = config
        head_dim = config.d_model // config.n_heads
        shape = (2, self._slots(loops), batch, config.n_heads, max_len, head_dim)
        self.kv = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.valid: Tensor | None = None  # bool [slots, B, max_len]; None: all keys are seen
        self.length = 0
        self.loops: int | None = None  # of the tokens stored so far

    @property
    def slots(self) -> int:
        return self.kv.shape[1]

    @property
    def max_len(self) -> int:
        return self.kv.shape[4]

    def _slots(self, loops: int) -> int:
        c = self.config
        return c.prelude + c.n_layers * key_loops(c, loops) + c.coda

    def slot(self, loop: int | None, block: int) -> int:
        """Return the slot of a visit: of its loop (None: outside of the loops) and its block."""
        if loop is None and block >= self.config.prelude:
            loop = key_loops(self.config, self.loops or 1) - 1
        return block + (loop or 0) * self.config.n_layers

    def check(self, batch: int, loops: int) -> None:
        """Refuse another batch, more loops than there are slots, or a change of loops midway."""
        if self._slots(loops) > self.slots:
            raise InputError(
                f"loops={loops}: the cache has {self.slots} slots, one a loop and layer; make it "
                f"with new_cache(..., loops={loops})"
            )
        if batch != self.kv.shape[2]:
            raise InputError(f"tokens: {batch} sequences, but the cache is for {self.kv.shape[2]}")
        if self.length and self.loops != loops:
            raise InputError(
                f"loops={loops}: the cache was filled by {self.loops} loops; go on with those"
            )
        self.loops = loops

    def update(
        self,
        loop: int | None,
        block: int,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store a visit's new keys and values after the past ones.

        Args:
            loop: counted from 0; None outside of the loops.
            block: physical block, counted over prelude, core and coda.
            k, v: [B, heads, T, head_dim].
            valid: bool [B, T], tokens whose keys other tokens see; None: all.

        Returns:
            Past and new keys and values [B, heads, length + T, head_dim], and the causal mask
            bool [T, length + T], or [B, 1, T, length + T] with valid; None where plain causal
            attention or a single token needs none.
        """
        slot, new = self.slot(loop, block), k.shape[2]
        end = self.length + new
        self.kv[0, slot, :, :, self.length : end] = k
        self.kv[1, slot, :, :, self.length : end] = v
        mask = None
        if valid is not None:
            mask = visible(self._note_valid(slot, valid), new)
        elif self.length and new > 1:
            mask = torch.ones(new, end, dtype=torch.bool, device=k.device).tril(self.length)
        return self.kv[0, slot, :, :, :end], self.kv[1, slot, :, :, :end], mask

    def _note_valid(self, slot: int, valid: Tensor) -> Tensor:
        """Store which new tokens' keys are seen; returns those of all tokens so far, bool [B, n].

        A slot is always given them or never.
        """
        if self.valid is None:
            shape = (self.slots, self.kv.shape[2], self.max_len)
            self.valid = torch.zeros(shape, dtype=torch.bool, device=valid.device)
        end = self.length + valid.shape[1]
        self.valid[slot, :, self.length : end] = valid
        return self.valid[slot, :, :end]

    def advance(self, new: int) -> None:
        """Count `new` tokens as past, once every visit has stored them."""
        self.length += new


def visible(valid: Tensor, new: int) -> Tensor:
    """Return the causal mask of the last `new` tokens over all: bool [B, 1, new, n].

    A token sees itself in any case, so that no row of the mask is empty.

    Args:
        valid: bool [B, n], tokens whose keys others see.
        new: tokens that have queries.
    """
    past = valid.shape[1] - new
    square = torch.ones(new, valid.shape[1], dtype=torch.bool, device=valid.device)
    return (valid[:, None, None] | square.triu(past)) & square.tril(past)
