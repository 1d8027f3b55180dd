"""Reasoners from their equations, in plain PyTorch, to compare the model with."""

from typing import NamedTuple

import torch

from deeploop.config import ModelConfig, ReasonerConfig
from deeploop.model.attention import Attention, rope_tables
from deeploop.model.mlp import PositionMixer
from deeploop.model.reasoner import Reasoner, positions
from tests.helpers.plain_model import EPS, ROPE_BASE, plain_attention, plain_swiglu, rms_norm

CELLS, VOCAB = 5, 7


def small(reasoner=None, **changes) -> ModelConfig:
    """A reasoner of a few hundred weights; no value is a default that code may have instead."""
    fields = dict(cycles_high=2, cycles_low=3, layers_high=2, layers_low=1, puzzle_tokens=2,
                  puzzles=4)  # fmt: skip
    return ModelConfig(
        residual="plain_post_norm", d_model=8, n_heads=2, d_ff=12, vocab_size=VOCAB, seq_len=CELLS,
        norm_eps=EPS, rope_base=ROPE_BASE, reasoner=ReasonerConfig(**fields | (reasoner or {})),
        **changes,
    )  # fmt: skip


def scattered(config: ModelConfig, seed: int = 0) -> Reasoner:
    """Make a float64 model whose weights all differ from those of the start."""
    torch.manual_seed(seed)
    model = Reasoner(config).double()
    c = config
    if c.reasoner.positions:
        model.cos, model.sin = rope_tables(positions(c), c.d_model // c.n_heads, c.rope_base)
    for p in model.parameters():
        p.data.normal_(std=0.4)
    if model.puzzles is not None:
        model.puzzles.weight.normal_(std=0.3)
    return model


def examples(seed: int = 1, batch: int = 3):
    """Return tokens, puzzles of which two are equal, and targets of which some are left out."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, VOCAB, (2, batch, CELLS), generator=generator)
    targets[0, 1:3] = -100
    return tokens, torch.tensor([2, 0, 2])[:batch], targets


class PlainSegment(NamedTuple):
    z_H: torch.Tensor
    z_L: torch.Tensor
    logits: torch.Tensor
    q: torch.Tensor


def plain_module(sublayers, z, x, alpha, c):
    """Blocks on z + x: attention (or a mixer over positions), SwiGLU, a post norm after each."""
    h = z + x
    for sublayer in sublayers:
        branch = sublayer.branch
        if isinstance(branch, PositionMixer):
            y = h.transpose(1, 2)
            h = rms_norm(alpha * y + plain_swiglu(branch, y), eps=c.norm_eps).transpose(1, 2)
        elif isinstance(branch, Attention):
            base = c.rope_base if c.reasoner.positions else None
            f = plain_attention(branch, h, base=base, eps=c.norm_eps, causal=False)
            h = rms_norm(alpha * h + f, eps=c.norm_eps)
        else:
            h = rms_norm(alpha * h + plain_swiglu(branch, h), eps=c.norm_eps)
    return h


def plain_segment(model, tokens, vectors, z_H, z_L, alphas=(1.0, 1.0), attached=2):
    """One segment; the last `attached` calls of LLLH LLLH ... have gradients.

    vectors: [puzzles, d] in the place of the model's own; None without puzzle tokens.
    alphas: of H and of L.
    """
    c, r = model.config, model.config.reasoner
    e = model.embed_tokens.weight[tokens]
    if r.puzzle_tokens:
        empty = torch.zeros(len(tokens), r.puzzle_tokens - 1, c.d_model, dtype=e.dtype)
        e = torch.cat([vectors[:, None], empty, e], 1)
    e = c.d_model**0.5 * e
    low = model.low.sublayers
    high = low if r.shared else model.own_high.sublayers
    calls = ("L" * r.cycles_low + "H") * r.cycles_high
    for i, call in enumerate(calls):
        if call == "L":
            z_L = plain_module(low, z_L, z_H + e, alphas[1], c)
        else:
            z_H = plain_module(high, z_H, z_L, alphas[0], c)
        if i < len(calls) - attached:
            z_H, z_L = z_H.detach(), z_L.detach()
    logits = z_H[:, r.puzzle_tokens :] @ model.lm_head.weight.T
    q = z_H[:, 0] @ model.q_head.weight.T + model.q_head.bias
    return PlainSegment(z_H, z_L, logits, q)


def plain_stablemax(logits, targets):
    """-log of s(x_y) / sum s(x), a label at a time; mean over the labels of each sequence."""
    losses = []
    for rows, labels in zip(logits, targets, strict=True):
        total, count = 0.0, 0
        for x, y in zip(rows, labels.tolist(), strict=True):
            if y == -100:
                continue
            s = [v + 1 if v >= 0 else 1 / (1 - v) for v in x]
            total, count = total - (s[y] / sum(s)).log(), count + 1
        losses.append(total / max(count, 1))
    return torch.stack(losses)


def plain_loss(segment, targets, batch, target=None):
    """The loss of a segment, divided by the sequences of the whole batch."""
    exact = torch.tensor([
        all(y in (-100, int(x.argmax())) for x, y in zip(rows, labels.tolist(), strict=True))
        for rows, labels in zip(segment.logits, targets, strict=True)
    ]).double()  # fmt: skip

    def bce(logit, wanted):
        p = 1 / (1 + (-logit).exp())
        return -(wanted * p.log() + (1 - wanted) * (1 - p).log())

    loss = plain_stablemax(segment.logits, targets) + 0.5 * bce(segment.q[:, 0], exact)
    if target is not None:
        loss = loss + 0.5 * bce(segment.q[:, 1], target)
    return loss.sum() / batch
