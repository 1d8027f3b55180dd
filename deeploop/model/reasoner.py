"""Reasoner: two states that two modules refine in cycles (HRM, TRM).

    e = sqrt(d) [puzzle; embed(tokens)]       positions: P of the puzzle, then T cells
    for cycle in range(C_H):
        for step in range(C_L):
            z_L = L(z_L, z_H + e)
        z_H = H(z_H, z_L)
    logits = head(z_H of the cells),  q = q_head(z_H at position 0)

A module adds its second argument to its first and runs its blocks on the sum: attention over all
positions (or a SwiGLU over them), then a SwiGLU, each followed by h' = RMSNorm(alpha h + f)
(`plain_post_norm`). One such run is a *segment*; its states, without gradient, are where the next
segment of the sequence starts, and an optimizer step follows each. Of a segment's calls only the
last of L and of H have gradients (`one_step`, HRM), or those of the last cycle (`last_cycle`, TRM).
In TRM one module has both roles.

Sources: HRM, arXiv 2506.21734; TRM, arXiv 2510.04871; DeepLoop on HRM, arXiv 2607.13491.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig, ReasonerConfig
from deeploop.config.reasoner import Scales, module_scales
from deeploop.model.attention import Attention, AttentionContext, rope_tables
from deeploop.model.init import truncated_normal_
from deeploop.model.mlp import PositionMixer, SwiGLU
from deeploop.model.puzzle_embedding import PuzzleEmbedding
from deeploop.model.residual import Residual, residual_rule
from deeploop.model.state import LoopState, OnVisit, visits
from deeploop.model.sublayer import Sublayer
from deeploop.utils.device import autocast_dtype
from deeploop.utils.errors import InputError
from deeploop.utils.spans import span

NO_COPIES: Mapping[tuple[int, int], Sequence[Sublayer]] = {}
Q_BIAS = -5.0  # sigmoid .0067: at first no sequence is thought to be right


class Carry(NamedTuple):
    """The two states that a segment starts from, each [B, P + T, d_model], without gradient."""

    high: Tensor
    low: Tensor


class Segment(NamedTuple):
    """What a segment gives."""

    carry: Carry  # for the next segment
    n: Tensor  # [B, T, d_model], for `Reasoner.logits`
    q: Tensor  # float32 [B, 2]: logits of halting and of going on


class Call(NamedTuple):
    """What a call of a module reads beside its two arguments."""

    context: AttentionContext
    number: int  # of the calls in this role, counted from 0: `Visit.loop`
    on_visit: OnVisit | None
    sublayers: Sequence[Sublayer] | None  # others in the place of the module's


class ReasonerModule(nn.Module):
    """L or H: blocks on the sum of a state and an input."""

    sublayers: Sequence[Sublayer]

    def __init__(self, config: ModelConfig, layers: int, scales: Scales, first_block: int = 0):
        super().__init__()
        self.rule, self.first_block = residual_rule(config, scales), first_block
        made = [s for _ in range(layers) for s in _block(config, self.rule)]
        self.sublayers = nn.ModuleList(made)  # type: ignore[assignment]

    def forward(self, z: Tensor, x: Tensor, call: Call) -> Tensor:
        """Run the blocks on z + x, each [B, P + T, d_model]; returns the new z."""
        h = z + x
        s = LoopState(h, h.to(autocast_dtype(h)))
        for visit in visits(
            call.sublayers or self.sublayers, call.number, self.first_block, None, norm=False
        ):
            with span(visit.sublayer.kind):
                f = visit.branch(s.normed, call.context)
            with span("updates"):
                s = self.rule(s, f, visit)
            if call.on_visit is not None:
                call.on_visit(visit, s.h)
        return s.h


class Reasoner(nn.Module):
    """Embedding, the modules L and H, their start states, head and Q head.

    `forward` runs one segment. It returns states, not logits; `logits` applies the head.
    """

    start_high: Tensor
    start_low: Tensor
    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        r, d = config.reasoner, config.d_model
        for name, value in (("vocab_size", config.vocab_size), ("reasoner.puzzles", r.puzzles)):
            if not value and (name == "vocab_size" or r.puzzle_tokens):
                raise InputError(
                    f"model.{name}=0: a model needs a number of them; give that of the data"
                )
        self.config = config
        high, low = module_scales(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.puzzles = PuzzleEmbedding(r.puzzles, d) if r.puzzle_tokens else None
        self.low = ReasonerModule(config, r.layers_low, low)
        self.own_high = (
            None if r.shared else ReasonerModule(config, r.layers_high, high, r.layers_low)
        )
        self.lm_head = nn.Linear(d, config.vocab_size, bias=False)
        self.q_head = nn.Linear(d, 2)
        self.register_buffer("start_high", torch.empty(d))
        self.register_buffer("start_low", torch.empty(d))
        cos, sin = rope_tables(positions(config), d // config.n_heads, config.rope_base)
        if not r.positions:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        self.register_buffer("cos", cos.float(), persistent=False)
        self.register_buffer("sin", sin.float(), persistent=False)
        init_weights(self)

    @property
    def high(self) -> ReasonerModule:
        """The module H; L itself where one has both roles."""
        return self.low if self.own_high is None else self.own_high

    def all_sublayers(self) -> Iterator[Sublayer]:
        """Yield every physical sublayer once: those of L, then those of H."""
        yield from self.low.sublayers
        if self.own_high is not None:
            yield from self.own_high.sublayers

    def start(self, batch: int) -> Carry:
        """Return the states that `batch` sequences start from, views of the two buffers."""
        shape = (batch, positions(self.config), self.config.d_model)
        return Carry(self.start_high.expand(shape), self.start_low.expand(shape))

    def reset(self, carry: Carry, where: Tensor) -> Carry:
        """Start some sequences again: where bool [B]."""
        where = where[:, None, None]
        return Carry(
            torch.where(where, self.start_high, carry.high),
            torch.where(where, self.start_low, carry.low),
        )

    def forward(
        self,
        tokens: Tensor,
        puzzles: Tensor | None,
        carry: Carry,
        on_visit: OnVisit | None = None,
        by_call: Mapping[tuple[int, int], Sequence[Sublayer]] = NO_COPIES,
    ) -> Segment:
        """Run one segment.

        Args:
            tokens: int64 [B, seq_len], the cells.
            puzzles: int64 [B], of a model with puzzle tokens; else not read.
            carry: the states after the segment before, or of `start`.
            on_visit: called with each visit and the stream after it.
            by_call: other sublayers for some calls, such as copies with gradients of their own, by
                (cycle, step of L), or (cycle, -1) for H.

        Raises:
            InputError: another number of cells than `model.seq_len`, or no puzzles where the model
                has tokens for them.
        """
        e = self.embed(tokens, puzzles)
        L, H, (z_H, z_L), r = self.low, self.high, carry, self.config.reasoner
        context = self.context(e)

        def call(cycle: int, step: int = -1) -> Call:
            number = cycle if step == -1 else cycle * r.cycles_low + step
            return Call(context, number, on_visit, by_call.get((cycle, step)))

        for cycle in range(r.cycles_high):
            for step in range(r.cycles_low):
                with self.gradient(cycle, step):
                    z_L = L(z_L, z_H + e, call(cycle, step))
            with self.gradient(cycle):
                z_H = H(z_H, z_L, call(cycle))
        return Segment(Carry(z_H.detach(), z_L.detach()), z_H[:, r.puzzle_tokens :], self.q(z_H))

    def gradient(self, cycle: int, step: int = -1) -> AbstractContextManager:
        """Return a context with gradients on if a call has them: a step of L, or -1 for H."""
        r = self.config.reasoner
        first = r.cycles_low - r.low_calls  # of the last cycle's calls of L
        has = cycle == r.cycles_high - 1 and (step == -1 or step >= first)
        return torch.set_grad_enabled(has and torch.is_grad_enabled())

    def embed(self, tokens: Tensor, puzzles: Tensor | None) -> Tensor:
        """Return e: tokens int64 [B, T], puzzles int64 [B] -> [B, P + T, d_model].

        The first of a puzzle's P positions has its vector, the others are 0.
        """
        length, slots = self.config.seq_len, self.config.reasoner.puzzle_tokens
        if tokens.shape[1] != length:
            raise InputError(f"tokens: {tokens.shape[1]} cells, but the model has {length}")
        with span("embedding"):
            e = self.embed_tokens(tokens)
            if self.puzzles is not None:
                if puzzles is None:
                    raise InputError("puzzles: none given, but the model has puzzle tokens")
                vector = self.puzzles(puzzles)[:, None]
                e = torch.cat((F.pad(vector, (0, 0, 0, slots - 1)), e), 1)
            return e * self.config.d_model**0.5

    def context(self, e: Tensor) -> AttentionContext:
        """Return what attention reads beside its input: all positions see each other."""
        dtype = autocast_dtype(e)
        return AttentionContext(self.cos.to(dtype), self.sin.to(dtype), causal=False)

    def q(self, z: Tensor) -> Tensor:
        """Return the Q logits [B, 2] of z_H, in float32 under autocast, too."""
        with torch.autocast(z.device.type, enabled=False):
            return F.linear(z[:, 0], self.q_head.weight, self.q_head.bias)

    def halts(self, q: Tensor) -> Tensor:
        """Return whether sequences would halt by their Q logits [B, 2]: bool [B]."""
        return says_halt(q, self.config.reasoner)

    @property
    def head(self) -> Tensor:
        """The head's matrix [vocab_size, d_model]."""
        return self.lm_head.weight

    def logits(self, n: Tensor) -> Tensor:
        """Apply the head: states of cells [..., d_model] -> logits [..., vocab_size]."""
        return self.lm_head(n)

    def describe(self) -> str:
        """Return the modules and their scales, where these are not 1, for the log."""
        r = self.config.reasoner
        high, low = (module.rule.describe() for module in (self.high, self.low))
        scales = low if high == low else f"H: {high}; L: {low}"
        modules = f"{r.layers_low} blocks as L and H"
        if not r.shared:
            modules = f"L of {r.layers_low} blocks and H of {r.layers_high}"
        return f"{modules}, {r.mixer}" + (f", {scales}" if scales else "")


def says_halt(q: Tensor, config: ReasonerConfig) -> Tensor:
    """Return whether Q logits [B, 2] say halt, as `config.halting` reads them: bool [B]."""
    q_halt, q_continue = q.unbind(-1)
    return q_halt > (q_continue if config.halting == "halt_continue" else 0.0)


def positions(config: ModelConfig) -> int:
    """Return P + T, the positions of a sequence: puzzle tokens, then cells."""
    return config.reasoner.puzzle_tokens + config.seq_len


def _block(config: ModelConfig, rule: Residual) -> list[Sublayer]:
    """Make one block: what mixes positions, then SwiGLU."""
    d, r, length = config.d_model, config.reasoner, positions(config)
    mixer: Attention | PositionMixer
    if r.mixer == "mlp":
        mixer = PositionMixer(length, r.mixer_width or 64 * -(-8 * length // (3 * 64)))
    else:
        mixer = Attention(d, config.n_heads, config.qk_norm, config.norm_eps)
    return [Sublayer(branch, d, rule) for branch in (mixer, SwiGLU(d, config.ff_width))]


@torch.no_grad()
def init_weights(model: Reasoner) -> None:
    """Fill the weights from truncated normals of deviation fan_in^-1/2 (LeCun), as HRM's code.

    beta multiplies V, O and the SwiGLUs' matrices of each module, never Q and K. The embedding has
    a deviation of d_model^-1/2, so that e has 1; the start states have 1. The Q head starts with
    weights 0 and biases -5.
    """
    d = model.config.d_model
    truncated_normal_(model.embed_tokens.weight, d**-0.5)
    truncated_normal_(model.lm_head.weight, d**-0.5)
    model.q_head.weight.zero_()
    model.q_head.bias.fill_(Q_BIAS)
    for start in (model.start_high, model.start_low):
        truncated_normal_(start, 1.0)
    modules = [m for m in (model.low, model.own_high) if m is not None]
    for module, sublayer in ((m, s) for m in modules for s in m.sublayers):
        for name, linear in sublayer.branch.named_children():
            assert isinstance(linear, nn.Linear)
            truncated_normal_(linear.weight, linear.in_features**-0.5)
            scaled = linear.weight[2 * d :] if name == "qkv" else linear.weight
            scaled.mul_(module.rule.init_gain())
