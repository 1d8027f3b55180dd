"""Transformers from their definitions, in plain PyTorch, to compare the models with.

`plain_forward` runs any looped model: its own attention, SwiGLU and MoE written out below, and
the residual rule's `reference`.
"""

import math

import torch

from deeploop.model.attention import Attention, rope_tables
from deeploop.model.looplm import LoopLM
from deeploop.model.mlp import SwiGLU
from deeploop.model.state import LoopState, Visit

# Not the defaults, so that a value written into the code shows.
EPS, ROPE_BASE = 1e-2, 100.0


def scattered(model: LoopLM) -> LoopLM:
    """Make a model float64, with gains, routers and biases that all differ."""
    model = model.double()
    c = model.config
    model.cos, model.sin = rope_tables(c.seq_len, c.d_model // c.n_heads, c.rope_base)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.uniform_(0.5, 1.5)
        if "router" in name:
            p.data.normal_()
    for name, b in model.named_buffers():
        if name.endswith("bias"):
            b.uniform_(-0.3, 0.3)
    return model


def rms_norm(x, gain=None, eps=EPS):
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y if gain is None else y * gain


def plain_attention(branch, x, qk_norm=False, base=ROPE_BASE, eps=EPS):
    """Attention from its definition: one head at a time, complex-number RoPE."""
    T, d = x.shape[1:]
    D = branch.head_dim
    wq, wk, wv = branch.qkv.weight.split(d)
    angle = torch.arange(T, dtype=x.dtype)[:, None] * base ** (
        -torch.arange(0, D, 2, dtype=x.dtype) / D
    )
    turn = torch.polar(torch.ones_like(angle), angle)
    heads = []
    for i in range(branch.n_heads):
        rows = slice(i * D, (i + 1) * D)
        q, k, v = (x @ w[rows].T for w in (wq, wk, wv))
        if qk_norm:
            q, k = rms_norm(q, eps=eps), rms_norm(k, eps=eps)
        q, k = (torch.complex(z[..., : D // 2], z[..., D // 2 :]) * turn for z in (q, k))
        scores = (q @ k.conj().transpose(-1, -2)).real / math.sqrt(D)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
    return torch.cat(heads, -1) @ branch.out.weight.T


def plain_swiglu(branch, x):
    gate, up = (x @ branch.gate_up.weight.T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ branch.out.weight.T


def plain_moe(moe, n, router):
    """Top-k by sigmoid + bias; weights without it; every expert run on every token."""
    score = torch.sigmoid(n @ router.T)
    chosen = (score + moe.bias).topk(moe.top_k, dim=-1).indices
    weights = torch.zeros_like(score).scatter(-1, chosen, score.gather(-1, chosen))
    weights = weights / weights.sum(-1, keepdim=True)
    f = 0 if moe.shared is None else plain_swiglu(moe.shared, n)
    for e in range(score.shape[-1]):
        gate, up = (n @ moe.gate_up[e].T).chunk(2, -1)
        out = (gate * torch.sigmoid(gate) * up) @ moe.down[e].T
        f = f + weights[..., e, None] * out
    return f


def plain_branch(branch, x, config, loop=0):
    if isinstance(branch, Attention):
        return plain_attention(branch, x, config.qk_norm, config.rope_base, config.norm_eps)
    if isinstance(branch, SwiGLU):
        return plain_swiglu(branch, x)
    return plain_moe(branch, x, branch.routers[min(loop, len(branch.routers) - 1)])


def plain_forward(model: LoopLM, tokens, loops=None):
    """Final normalised states [B, T, d_model], from a model's weights and its rule's reference.

    The norms before branches and head are written here, those of the rule in its reference.
    """
    c, rule = model.config, model.rule
    s = LoopState(
        rule.embed(model.embed_tokens.weight[tokens], model.norm_embed and model.norm_embed.weight)
    )

    def walk(s, sublayers, loop):
        for j, sublayer in enumerate(sublayers):
            n = rms_norm(s.h, sublayer.gain_in, c.norm_eps)
            f = plain_branch(sublayer.branch, n, c, loop or 0)
            s = rule.reference(s, f, Visit(loop, j // 2, j, sublayer, None))
        return s

    s = walk(s, model.prelude, None)
    e = s.h
    for loop in range(c.loops if loops is None else loops):
        s = walk(rule.start_reference(s, e, loop), model.sublayers, loop)
    return rms_norm(walk(s, model.coda, None).h, model.final_gain, c.norm_eps)


def check_gradients(model: LoopLM, tokens, **tolerance):
    """Compare a model's final states and all gradients with the plain model's."""
    n, wanted = model(tokens), plain_forward(model, tokens)
    torch.testing.assert_close(n, wanted, **tolerance)
    direction = torch.randn(n.shape, dtype=n.dtype, generator=torch.Generator().manual_seed(2))
    parameters = dict(model.named_parameters())
    parameters.pop("lm_head.weight", None)  # used after the final states
    ours = torch.autograd.grad((n * direction).sum(), list(parameters.values()))
    plain = torch.autograd.grad((wanted * direction).sum(), list(parameters.values()))
    for name, a, b in zip(parameters, ours, plain, strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
