"""The data that flow through a looped Transformer: visits, and the state between them.

A *sublayer* (attention, MLP or MoE) owns parameters; a *visit* is one use of it. The residual
stream `h` and the next sublayer's already normalised input `n` travel together, so that each
visit ends in one fused kernel: residual rule plus following norm.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deeploop.model.attention import AttentionContext, KeysValues
from deeploop.model.loop_signal import Modulation
from deeploop.model.moe.layer import MoE, Routed
from deeploop.model.sublayer import Sublayer


class Visit(NamedTuple):
    """One use of a sublayer, and the norm that follows it."""

    loop: int | None  # counted from 0; None for a block before or after the loops
    block: int  # physical block, counted from 0 over prelude, core and coda
    sublayer_index: int  # in its list: LoopLM.prelude, .sublayers or .coda
    sublayer: Sublayer
    next_gain: Tensor | None  # [d_model] gain of the following norm; None: all ones
    norm: bool = True  # False: no norm follows, as the next loop starts with one
    ends_loop: bool = False  # the last visit of its loop
    gain_in: Tensor | None = None  # [d_model] gain of the norm before it; None: all ones
    gate: Tensor | None = None  # [d_model] factor of the branch's output; None: 1

    def branch(self, n: Tensor, context: AttentionContext) -> "Tensor | Routed":
        """Run the sublayer's branch on its normalised input [B, T, d_model]."""
        branch = self.sublayer.branch
        # The loop's matrices, not its number: a compiled branch then serves every loop.
        if isinstance(branch, MoE):
            f = branch(n, branch.router(self.loop or 0))
        else:
            f = branch(n, context, self.sublayer.adapters_in(self.loop))
        return f if self.gate is None else gated(f, self.gate)


OnVisit = Callable[[Visit, Tensor], None]  # called with each visit and the stream after it


class Draws(NamedTuple):
    """What is drawn for each sequence of a batch."""

    keys: Tensor | None = None  # int64 [B], of the start's noise; None: 0 for each
    first_loops: Tensor | None = None  # int64 [B], the first loop it takes part in; None: 0


class LoopInputs(NamedTuple):
    """What the loops of a forward read beside the state."""

    e: Tensor  # [B, T, d_model] the loops' input
    x: Tensor  # [B, T, d_model] the summand made of it (`Injection.prepare`)
    rope: tuple[Tensor, Tensor]  # cos and sin, [T, 1, head_dim]; of some tokens [B, k, 1, head_dim]
    cached: bool = False  # whether a cache keeps the keys and values of every loop
    places: Tensor | None = None  # int64 [B, k], rising: the tokens that the state has; None: all
    valid: Tensor | None = None  # bool [B, T], tokens whose keys others see; None: all
    mask: Tensor | None = None  # bool [B, 1, k, T], of the state's tokens over the first loop's

    def of(self, x: Tensor) -> Tensor:
        """Return the rows of x [B, T, ...] for the tokens that the state has."""
        return x if self.places is None else take(x, self.places)

    def take(self, places: Tensor) -> "LoopInputs":
        """Return the inputs for some tokens, int64 [B, k], rising; e and x stay whole (`of`)."""
        cos, sin = self.rope
        return self._replace(rope=(cos[places], sin[places]), places=places)


class LoopState(NamedTuple):
    """The state between two visits."""

    h: Tensor  # [B, T, d_model] residual stream
    n: Tensor | None = None  # [B, T, d_model] normalised input of the next visit
    memory: Any = None  # further tensors of the residual rule, such as LOOM's averages
    router_z: Tensor | None = None  # scalar: sum over MoE visits of mean squared logsumexp
    expert_loads: tuple[Tensor, ...] = ()  # of each MoE visit: int64 [experts]
    depth: Any = None  # tensors of the depth rule, such as ACT's halting sums
    kv: tuple[KeysValues, ...] = ()  # of the first loop's attention, where later loops read them

    @property
    def normed(self) -> Tensor:
        """The next visit's normalised input; raises RuntimeError before a loop has started."""
        if self.n is None:
            raise RuntimeError("the state has no normalised input: start a loop first")
        return self.n

    def with_routing(self, f: "Tensor | Routed") -> "LoopState":
        """Add a branch output's router statistics; the same state for a dense branch."""
        if not isinstance(f, Routed):
            return self
        z = f.z if self.router_z is None else self.router_z + f.z
        return self._replace(router_z=z, expert_loads=(*self.expert_loads, f.load))


def visits(
    sublayers: Sequence[Sublayer],
    loop: int | None,
    first_block: int,
    next_gain: Tensor | None,
    norm: bool = True,
    modulation: Sequence[Modulation | None] | None = None,
) -> Iterator[Visit]:
    """Yield a visit of each sublayer, in order.

    Args:
        sublayers: attention and feed-forward by turns, two for each block.
        loop: counted from 0; None outside of the loops.
        first_block: index of the first block among all blocks.
        next_gain: gain [d_model] of the norm after the last visit.
        norm: whether a norm follows the last visit.
        modulation: factors of each sublayer in this loop (`deeploop.model.loop_signal`), or None.
    """
    factors: Sequence[Modulation | None] = modulation or [None] * len(sublayers)
    gains = [gain_in(s, m) for s, m in zip(sublayers, factors, strict=True)]
    last = len(sublayers) - 1
    for j, sublayer in enumerate(sublayers):
        ends = j == last
        yield Visit(
            loop, first_block + j // 2, j, sublayer, next_gain if ends else gains[j + 1],
            norm=norm or not ends, ends_loop=ends and loop is not None, gain_in=gains[j],
            gate=None if (m := factors[j]) is None else m.gate,
        )  # fmt: skip


def gain_in(sublayer: Sublayer, modulation: Modulation | None = None) -> Tensor | None:
    """Return the gain [d_model] of the norm before a sublayer in one loop; None: all ones."""
    gain = sublayer.gain_in
    if modulation is None:
        return gain
    return modulation.scale if gain is None else gain * modulation.scale


def rows(places: Tensor, length: int) -> Tensor:
    """Return the rows int64 [B k] of a tensor [B length, ...] of the tokens at places [B, k]."""
    first = torch.arange(0, len(places) * length, length, device=places.device)
    return (places + first[:, None]).flatten()


def take(x: Tensor, places: Tensor) -> Tensor:
    """Return the tokens of x [B, T, ...] at places, int64 [B, k]: [B, k, ...]."""
    taken = x.flatten(0, 1).index_select(0, rows(places, x.shape[1]))
    return taken.view(*places.shape, *x.shape[2:])


def put(x: Tensor, places: Tensor, new: Tensor) -> Tensor:
    """Return a copy of x [B, T, ...] with new [B, k, ...] at places, int64 [B, k]."""
    replaced = x.flatten(0, 1).index_copy(0, rows(places, x.shape[1]), new.flatten(0, 1))
    return replaced.view(x.shape)


def gated(f: "Tensor | Routed", gate: Tensor) -> "Tensor | Routed":
    """Multiply a branch's output by gate [d_model], in the output's dtype."""
    if isinstance(f, Tensor):
        return f * gate.to(f.dtype)
    shared = None if f.shared is None else f.shared * gate.to(f.shared.dtype)
    return f._replace(expert_out=f.expert_out * gate.to(f.expert_out.dtype), shared=shared)
