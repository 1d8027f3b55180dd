"""LoopLM: a causal language model whose core blocks run many times over.

    e = prelude(embed(tokens))            P blocks, run once
    s = start(e)                          e itself, or noise
    for loop in range(R):                 K physical blocks, the same weights in every loop
        s = rule.start_loop(inject(s, e))
        for visit in core: s = rule(s, visit.branch(s.n))
    logits = head(norm(coda(s)))          C blocks, run once

The residual rule (`deeploop.model.residual`) is the one thing that differs between DeepLoop
(arXiv 2607.13491), LOOM (arXiv 2610.01153) and the pre-norm baseline; Huginn (arXiv 2502.05171),
Ouro (arXiv 2510.25741) and others also differ in `start`, `inject` (`deeploop.model.injection`),
in a norm between loops and in the loop's number as an input (`deeploop.model.loop_signal`).
"""

# An annotation that is evaluated inside `run` would break the graph of torch.compile.
from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deeploop.config import ModelConfig
from deeploop.config.train import Recompute
from deeploop.model.attention import AttentionContext, rope_tables
from deeploop.model.borders import LoopBorders
from deeploop.model.depth import depth_rule
from deeploop.model.depth.base import OnLoop, detached, start_later
from deeploop.model.init import init_weights
from deeploop.model.kv.cache import KVCache
from deeploop.model.recompute import maybe_checkpoint
from deeploop.model.residual import residual_rule
from deeploop.model.state import Draws, LoopInputs, LoopState, OnVisit, Visit, gain_in, visits
from deeploop.model.sublayer import Sublayer, block
from deeploop.utils.device import autocast_dtype
from deeploop.utils.errors import InputError
from deeploop.utils.spans import span


class LoopLM(nn.Module):
    """Embedding, prelude, R loops over K blocks, coda, head.

    `forward` returns the final normalised states, not logits, so that a loss can fuse the
    head (`deeploop.model.loss`); `logits` applies the head.
    """

    cos: Tensor
    sin: Tensor
    prelude: Sequence[Sublayer]
    sublayers: Sequence[Sublayer]  # of the core, 2K
    coda: Sequence[Sublayer]

    def __init__(self, config: ModelConfig):
        super().__init__()
        if not config.vocab_size:
            raise InputError(
                "model.vocab_size=0: a model needs a number of ids; give the tokenizer's vocab_size"
            )
        self.config, self.rule = config, residual_rule(config)
        d, vocab = config.d_model, config.vocab_size
        self.norm_embed = nn.RMSNorm(d) if self.rule.norms_embedding else None
        self.norm_final = nn.RMSNorm(d) if self.rule.final_gain else None
        self.embed_tokens = nn.Embedding(vocab, d)
        self.lm_head = None if self.rule.ties_head else nn.Linear(d, vocab, bias=False)
        self.prelude = self._blocks(config.prelude, looped=False)
        self.sublayers = self._blocks(config.n_layers)
        self.coda = self._blocks(config.coda, looped=False)
        self.borders = LoopBorders(config, self.rule)
        self.depth = depth_rule(config)
        cos, sin = rope_tables(config.seq_len, d // config.n_heads, config.rope_base)
        self.register_buffer("cos", cos.float(), persistent=False)
        self.register_buffer("sin", sin.float(), persistent=False)
        init_weights(self)

    def _blocks(self, count: int, looped: bool = True) -> Sequence[Sublayer]:
        made = [s for _ in range(count) for s in block(self.config, self.rule, looped)]
        return nn.ModuleList(made)  # type: ignore[return-value]

    @property
    def head(self) -> Tensor:
        """The head's matrix [vocab_size, d_model]."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    @property
    def final_gain(self) -> Tensor | None:
        """Gain [d_model] of the norm before the head; None: all ones."""
        return None if self.norm_final is None else self.norm_final.weight

    def all_sublayers(self) -> Iterator[Sublayer]:
        """Yield every physical sublayer, in the order in which a token meets them."""
        yield from (*self.prelude, *self.sublayers, *self.coda)

    def forward(
        self,
        tokens: Tensor,
        loops: int | None = None,
        cache: KVCache | None = None,
        on_visit: OnVisit | None = None,
        draws: Draws = Draws(),  # noqa: B008
        on_loop: OnLoop | None = None,
    ) -> Tensor:
        """Run all loops: tokens int64 [B, T] -> final states [B, T, d_model], normalised.

        Args:
            tokens: int64 [B, T].
            loops: a loop count other than in training; alpha and gamma stay the training ones
                (LOOM's released code takes gamma of the new number), and loops past the last
                router take that one.
            cache: keys and values of the tokens before (`new_cache`).
            on_visit: called with each visit and the stream after it.
            draws: of each sequence: the keys of its start's noise (`deeploop.model.noise`), the
                first loop it takes part in; its state stays the start state until then.
            on_loop: called with the state after each loop, for `output`.

        Raises:
            InputError: fewer than one loop, too long a sequence, or a cache that does not fit.
        """
        loops = self.config.loops if loops is None else loops
        if loops < 1:
            raise InputError(f"loops={loops}: needs at least one loop")
        if cache is not None:
            cache.check(len(tokens), loops)
        s = self.run(
            tokens, range(loops), cache=cache, on_visit=on_visit, draws=draws, on_loop=on_loop
        )
        n = self.output(s, tokens, cache=cache, on_visit=on_visit)
        if cache is not None:
            cache.advance(tokens.shape[1])
        return n

    def run(
        self,
        tokens: Tensor,
        loops: range,
        state: LoopState | None = None,
        *,
        cache: KVCache | None = None,
        on_visit: OnVisit | None = None,
        recompute: Recompute = "none",
        by_loop: Sequence[Sequence[Sublayer]] | None = None,
        draws: Draws = Draws(),  # noqa: B008
        on_loop: OnLoop | None = None,
    ) -> LoopState:
        """Run some loops; returns the state after them, for `output` or for the loops to come.

        Args:
            tokens: int64 [B, T].
            loops: which loops, counted from 0; the first must follow those that made `state`.
            state: state after the loops before (`Residual.detach`); None starts from the tokens.
            recompute: keep only the inputs of each visit or loop for backward, and run it again
                there; experts are not chosen again.
            by_loop: other sublayers for each loop, such as copies with gradients of their own.
            draws: as in `forward`.
            on_loop: called with the state after each loop. For its final states give `output`
                the state without n, as n is normed for the loop after.
        """
        core, borders = by_loop or [self.sublayers] * loops.stop, self.borders
        first_gain = gain_in(core[loops.start][0], borders.factors(loops.start)[0])
        inputs, s = self._start(tokens, state, first_gain, cache, on_visit, draws)

        def visit_once(
            s: LoopState, where: tuple[Visit, LoopInputs], on_visit: OnVisit | None
        ) -> LoopState:
            visit, inputs = where
            return self._visit(s, visit, inputs.rope, cache, on_visit, inputs)

        def blocks(
            s: LoopState, where: tuple[int, LoopInputs], on_visit: OnVisit | None
        ) -> LoopState:
            loop, inputs = where
            norm = borders.norms_after(loop + 1 == loops.stop) and not self.depth.changes_stream
            gain = gain_after(loop) if norm else None
            prelude, factors = self.config.prelude, borders.factors(loop)
            first, *rest = visits(core[loop], loop, prelude, gain, norm, factors)
            with span("updates"):
                s = borders.start_loop(s, inputs, first)
            for visit in (first, *rest):
                s = maybe_checkpoint(visit_once, recompute == "visit")(s, (visit, inputs), on_visit)
            return borders.end_loop(s, self.final_gain)

        def gain_after(loop: int) -> Tensor | None:
            if loop + 1 < loops.stop:
                return gain_in(core[loop + 1][0], borders.factors(loop + 1)[0])
            return self.coda[0].gain_in if self.coda else self.final_gain

        def run_loop(s: LoopState, loop: int, inputs: LoopInputs) -> LoopState:
            after = maybe_checkpoint(blocks, recompute == "loop")(s, (loop, inputs), on_visit)
            return start_later(draws.first_loops, loop, after, s)

        return self.depth.run(s, loops, run_loop, inputs, on_loop)

    def _start(
        self,
        tokens: Tensor,
        state: LoopState | None,
        first_gain: Tensor | None,
        cache: KVCache | None,
        on_visit: OnVisit | None,
        draws: Draws,
    ) -> tuple[LoopInputs, LoopState]:
        """Return what the loops read, and the state before the first of them."""
        with span("embedding"):
            e = self.embed(tokens)
            rope = self.rope(tokens, cache, autocast_dtype(e))
        if state is None or self.borders.uses_input:
            start = self.borders.input(self._prelude(e, rope, first_gain, cache, on_visit))
            e, position = start.h, 0 if cache is None else cache.length
            if state is None:
                state = self.borders.start(start, position, draws.keys)
        return LoopInputs(e, self.borders.prepare(e), rope, cache is not None), state

    def output(
        self,
        s: LoopState,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        on_visit: OnVisit | None = None,
    ) -> Tensor:
        """Turn the state after the last loop into final normalised states, through the coda."""
        return self.coda_output(self.after_loops(s), tokens, cache=cache, on_visit=on_visit)

    def coda_output(
        self,
        s: LoopState,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        on_visit: OnVisit | None = None,
    ) -> Tensor:
        """Run the coda: a state of `after_loops` -> final normalised states [B, T, d_model]."""
        if self.coda:
            rope = self.rope(tokens, cache, s.normed.dtype)
            first = self.config.prelude + self.config.n_layers
            for visit in visits(self.coda, None, first, self.final_gain):
                s = self._visit(s, visit, rope, cache, on_visit)
        return s.normed

    def after_loops(self, s: LoopState) -> LoopState:
        """Return the state that the coda or the head reads, with its normalised input n."""
        return self.borders.after_loops(self.depth.readout(s), self.final_gain, self.coda)

    def detach(self, s: LoopState) -> LoopState:
        """Return the state that crosses a segment boundary, without gradient."""
        return self.rule.detach(s)._replace(depth=detached(s.depth), kv=detached(s.kv))

    def _prelude(
        self,
        e: Tensor,
        rope: tuple[Tensor, Tensor],
        next_gain: Tensor | None,
        cache: KVCache | None,
        on_visit: OnVisit | None,
    ) -> LoopState:
        """Return the loops' input as a state: the embedding, through the prelude."""
        s = LoopState(e)
        if not self.prelude:
            return s
        n = self.rule.input(e, self.prelude[0].gain_in)
        s = s._replace(n=n.to(autocast_dtype(e)))
        for visit in visits(self.prelude, None, 0, next_gain):
            s = self._visit(s, visit, rope, cache, on_visit)
        return s

    def _visit(
        self,
        s: LoopState,
        visit: Visit,
        rope: tuple[Tensor, Tensor],
        cache: KVCache | None,
        on_visit: OnVisit | None,
        inputs: LoopInputs | None = None,
    ) -> LoopState:
        """Run one visit: the branch, then the residual rule with the following norm."""
        context = self._context(s, visit, rope, cache, inputs)
        with span(visit.sublayer.kind):
            f = visit.branch(s.normed, context)
        with span("updates"):
            s = self.rule(s.with_routing(f), f, visit)
        if context.kept:
            s = s._replace(kv=(*s.kv, *context.kept))
        if on_visit is not None:
            on_visit(visit, s.h)
        return s

    def _context(
        self,
        s: LoopState,
        visit: Visit,
        rope: tuple[Tensor, Tensor],
        cache: KVCache | None,
        inputs: LoopInputs | None,
    ) -> AttentionContext:
        """Say which keys and values a visit reads; inputs are None outside of the loops."""
        context = AttentionContext(*rope, visit.loop, visit.block, cache)
        if inputs is None or visit.sublayer.kind != "attention":
            return context
        if not self.depth.shares_keys:
            return context._replace(valid=inputs.valid)
        if visit.loop == 0:
            return context._replace(kept=[])
        return context._replace(first=s.kv[visit.block - self.config.prelude], mask=inputs.mask)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [B, T] -> [B, T, d_model] float32, of mean square 1 at initialisation."""
        gain = None if self.norm_embed is None else self.norm_embed.weight
        return self.rule.embed(self.embed_tokens(tokens), gain)

    def rope(
        self, tokens: Tensor, cache: KVCache | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, head_dim] for these tokens' positions."""
        start = 0 if cache is None else cache.length
        end = start + tokens.shape[1]
        limit = self.config.seq_len
        if cache is not None:
            limit = min(limit, cache.max_len)
        if end > limit:
            raise InputError(f"tokens: {end} positions, but the model was built for {limit}")
        return self.cos[start:end].to(dtype), self.sin[start:end].to(dtype)

    def may_start_fresh(self, name: str) -> bool:
        """Return whether a weight may keep its initial value where all others are loaded.

        Those of adapters, which at first add nothing, and of depth rules, such as exit gates.
        """
        return ".adapters." in name or name.startswith("depth.")

    def logits(self, n: Tensor) -> Tensor:
        """Apply the head: final states [..., d_model] -> logits [..., vocab_size]."""
        return F.linear(n, self.head)

    def new_cache(self, batch: int, max_len: int, loops: int | None = None) -> KVCache:
        """Make an empty cache for `batch` sequences of up to `max_len` tokens."""
        return KVCache(self.config, batch, max_len, loops, like=self.embed_tokens.weight)


def count_parameters(model: nn.Module) -> int:
    """Count parameters in distinct storages: weights shared by visits count once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    sizes = {p.untyped_storage().data_ptr(): p.element_size() for p in model.parameters()}
    return sum(s.nbytes() // sizes[ptr] for ptr, s in storages.items())
