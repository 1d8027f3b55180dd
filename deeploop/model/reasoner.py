"""Reasoner: two states, z_L and z_H, that two small modules improve by turns (HRM, TRM).

    e = sqrt(d) embed(puzzle, cells)
    repeat cycles_high times:
        repeat cycles_low times:  z_L = L(z_L + z_H + e)
        z_H = H(z_H + z_L)
    logits = head(z_H of the cells),  q = q_head(z_H of the first position)

A module is n_layers blocks of attention and SwiGLU, each sublayer h = RMS(alpha h + f), without
gains; attention sees every position. This is one segment; the states it ends with, without
gradient, begin the next one (`deeploop.train.supervision`). Gradients go through the last passes
alone: `one_step` those of the last L and the last H, `last_cycle` the whole last cycle. In TRM one
network is both modules.

Sources: HRM, arXiv 2506.21734; TRM, arXiv 2510.04871; alpha, beta: DeepLoop, arXiv 2607.13491,
section 4.
"""

# An annotation that is evaluated inside `forward` would break the graph of torch.compile.
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deeploop.config import ModelConfig, scaling
from deeploop.model.attention import Attention, AttentionContext, rope_tables
from deeploop.model.mlp import PositionMixer, SwiGLU
from deeploop.model.puzzle_embedding import PuzzleEmbedding
from deeploop.model.residual.post_norm import BarePostNorm
from deeploop.model.state import LoopState, OnVisit, visits
from deeploop.model.sublayer import Sublayer
from deeploop.utils.device import autocast_dtype
from deeploop.utils.errors import InputError
from deeploop.utils.spans import span

LOW, HIGH = 0, 1  # the modules' numbers in Visit.loop


class Carry(NamedTuple):
    """The states between two segments, without gradient."""

    high: Tensor  # float32 [B, P + T, d_model]; P: puzzle_tokens
    low: Tensor  # as high


class Segment(NamedTuple):
    """The results of one segment."""

    carry: Carry
    n: Tensor  # [B, T, d_model] z_H of the cells, for `Reasoner.logits`
    q: Tensor  # float32 [B, 2] logits of halting and of going on


class Reasoner(nn.Module):
    """Embedding, the modules L and H, head and q head."""

    cos: Tensor
    sin: Tensor
    start_high: Tensor
    start_low: Tensor
    low: Sequence[Sublayer]
    high: Sequence[Sublayer]  # absent where L is both modules

    def __init__(self, config: ModelConfig):
        super().__init__()
        r, d, vocab = config.reasoner, config.d_model, config.vocab_size
        if not vocab or (r.puzzle_tokens and not r.puzzles):
            raise InputError(
                f"model.vocab_size={vocab}, model.reasoner.puzzles={r.puzzles}: a reasoner needs "
                "both; give those of the data set"
            )
        self.config, self.positions = config, r.puzzle_tokens + config.seq_len
        blocks = r.blocks_of_scales(config.n_layers)
        self.beta = 1.0 if blocks is None else scaling.beta(blocks)
        self.rule = BarePostNorm(config)
        self.rule.alpha = 1.0 if blocks is None else scaling.alpha(blocks)
        self.embed_tokens = nn.Embedding(vocab, d)
        self.embed_puzzles = None
        if r.puzzle_tokens:
            self.embed_puzzles = PuzzleEmbedding(r.puzzles, r.puzzle_tokens, d)
        self.low = self._module()
        if not r.shared:
            self.high = self._module()
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.q_head = nn.Linear(d, 2)
        for name in ("start_high", "start_low"):
            self.register_buffer(name, truncated_normal_(torch.empty(d)))
        cos, sin = rope_tables(self.positions, d // config.n_heads, config.rope_base)
        if not r.positions:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        self.register_buffer("cos", cos.float(), persistent=False)
        self.register_buffer("sin", sin.float(), persistent=False)
        self.init_weights()

    def _module(self) -> Sequence[Sublayer]:
        c, made = self.config, []
        for _ in range(c.n_layers):
            mixer: Attention | PositionMixer
            if c.reasoner.mixer == "attention":
                mixer = Attention(c.d_model, c.n_heads, c.qk_norm, c.norm_eps)
            else:
                mixer = PositionMixer(self.positions, mixer_width(self.positions))
            branches = (mixer, SwiGLU(c.d_model, c.ff_width))
            made += [Sublayer(branch, c.d_model, self.rule) for branch in branches]
        return nn.ModuleList(made)  # type: ignore[return-value]

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill matrices from a truncated normal of standard deviation fan_in^-1/2 (LeCun).

        beta scales those of V, O and the feed-forward branches, as DeepNorm's, never Q and K. The
        q head starts at weight 0 and bias -5, so that no row halts at first.
        """
        d = self.config.d_model
        truncated_normal_(self.embed_tokens.weight, d**-0.5)
        truncated_normal_(self.lm_head.weight, d**-0.5)
        for sublayer in self.all_sublayers():
            branch = sublayer.branch
            for weight in branch.parameters():
                truncated_normal_(weight, weight.shape[1] ** -0.5)
                v = 2 * d if isinstance(branch, Attention) and weight is branch.qkv.weight else 0
                weight[v:].mul_(self.beta)
        self.q_head.weight.zero_()
        self.q_head.bias.fill_(-5.0)

    def all_sublayers(self) -> Iterator[Sublayer]:
        """Yield every physical sublayer once: those of L, then those of H."""
        yield from self.low
        if not self.config.reasoner.shared:
            yield from self.high

    def describe(self) -> str:
        """Return the modules and the scales, for the log."""
        r, n = self.config.reasoner, self.config.n_layers
        modules = f"{n} blocks as L and H" if r.shared else f"L and H of {n} blocks each"
        return f"{modules}, {r.mixer}, alpha {self.rule.alpha:.3f}, beta {self.beta:.4f}"

    def start(self, batch: int) -> Carry:
        """Return the states of `batch` sequences before their first segment."""
        shape = batch, self.positions, self.config.d_model
        return Carry(self.start_high.expand(shape).clone(), self.start_low.expand(shape).clone())

    def reset(self, carry: Carry, where: Tensor) -> Carry:
        """Start the sequences anew where `where`, bool [B], is true."""
        at = where[:, None, None]
        high = torch.where(at, self.start_high, carry.high)
        return Carry(high, torch.where(at, self.start_low, carry.low))

    def forward(
        self,
        tokens: Tensor,
        puzzles: Tensor | None,
        carry: Carry,
        on_visit: OnVisit | None = None,
    ) -> Segment:
        """Run one segment.

        Args:
            tokens: int64 [B, T], the cells of a puzzle.
            puzzles: int64 [B], of the puzzle embedding; not read without one.
            carry: the states before.
            on_visit: called with each visit (its `loop` is LOW or HIGH) and the stream after it.

        Raises InputError where T is not the configured seq_len.
        """
        r, e = self.config.reasoner, self.embed(tokens, puzzles)
        rope = self.cos.to(autocast_dtype(e)), self.sin.to(autocast_dtype(e))
        context = AttentionContext(*rope, causal=False)
        calls = ([LOW] * r.cycles_low + [HIGH]) * r.cycles_high
        z_h, z_l = carry
        for i, module in enumerate(calls):
            with torch.set_grad_enabled(
                torch.is_grad_enabled() and i >= len(calls) - r.calls_with_gradient
            ):
                if module == LOW:
                    z_l = self.run(LOW, z_l + (z_h + e), context, on_visit)
                else:
                    z_h = self.run(HIGH, z_h + z_l, context, on_visit)
        q = self.q_head(z_h[:, 0].to(autocast_dtype(e))).float()
        return Segment(Carry(z_h.detach(), z_l.detach()), z_h[:, r.puzzle_tokens :], q)

    def embed(self, tokens: Tensor, puzzles: Tensor | None) -> Tensor:
        """Embed tokens [B, T] after their puzzles' tokens: float32 [B, P + T, d_model]."""
        c = self.config
        if tokens.shape[1] != c.seq_len:
            raise InputError(
                f"tokens: {tokens.shape[1]} cells, but the model was built for {c.seq_len}"
            )
        with span("embedding"):
            e = self.embed_tokens(tokens)
            if self.embed_puzzles is not None:
                if puzzles is None:
                    raise InputError("puzzles: are needed, as model.reasoner.puzzle_tokens > 0")
                e = torch.cat((self.embed_puzzles(puzzles), e), 1)
            return e * math.sqrt(c.d_model)

    def run(
        self, module: int, h: Tensor, context: AttentionContext, on_visit: OnVisit | None
    ) -> Tensor:
        """Run the blocks of a module on its state with the inputs added, [B, P + T, d_model]."""
        s = LoopState(h, h.to(autocast_dtype(h)))
        sublayers = self.low if module == LOW or self.config.reasoner.shared else self.high
        for visit in visits(sublayers, module, 0, None):
            with span(visit.sublayer.kind):
                f = visit.branch(s.normed, context)
            with span("updates"):
                s = self.rule(s, f, visit)
            if on_visit is not None:
                on_visit(visit, s.h)
        return s.h

    def halts(self, q: Tensor) -> Tensor:
        """Return whether the q head, [B, 2] logits, would halt: bool [B]."""
        if self.config.reasoner.halting == "halt_continue":
            return q[:, 0] > q[:, 1]
        return q[:, 0] > 0

    @property
    def head(self) -> Tensor:
        """The head's matrix [vocab_size, d_model]."""
        return self.lm_head.weight

    def logits(self, n: Tensor) -> Tensor:
        """Apply the head: states [..., d_model] -> logits [..., vocab_size]."""
        return self.lm_head(n.to(autocast_dtype(n)))


def mixer_width(positions: int) -> int:
    """Return the inner width of the SwiGLU across positions: 8/3 of them, to a multiple of 256."""
    return 256 * max(1, math.ceil(round(8 * positions / 3) / 256))


def truncated_normal_(x: Tensor, std: float = 1.0) -> Tensor:
    """Fill x from a normal cut at two deviations, of standard deviation `std` after the cut."""
    kept = 0.87962566103423978  # deviation of a standard normal that is cut at -2 and 2
    return nn.init.trunc_normal_(x, std=std / kept, a=-2 * std / kept, b=2 * std / kept)
