"""Transformers from their definitions, in plain PyTorch, to compare the models with.

`plain_forward` runs any looped model: its own attention, SwiGLU and MoE written out below, and
the residual rule's `reference`.
"""

import math

import torch

from deeploop.model.attention import Attention, rope_tables
from deeploop.model.looplm import LoopLM
from deeploop.model.mlp import SwiGLU
from deeploop.model.noise import truncated_normal
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
        if "router" in name or "borders" in name or name.startswith("depth"):
            p.data.normal_(std=1.0 if "router" in name else 0.3)
    for name, b in model.named_buffers():
        if name.endswith("bias"):
            b.uniform_(-0.3, 0.3)
    return model


def rms_norm(x, gain=None, eps=EPS):
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return y if gain is None else y * gain


def plain_attention(
    branch, x, qk_norm=False, base=ROPE_BASE, eps=EPS, seen=None, y=None, causal=True
):
    """Attention from its definition: one head at a time, complex-number RoPE.

    seen: bool [B, T], tokens whose keys others see; None: all. A token sees itself in any case.
    y: what keys and values are made of; None: x.
    causal: whether a token sees those before it alone.
    base: of RoPE; None: no positions.
    """
    y = x if y is None else y
    T, d = x.shape[1:]
    D = branch.head_dim
    wq, wk, wv = branch.qkv.weight.split(d)
    angle = torch.arange(T, dtype=x.dtype)[:, None] * (base or 1.0) ** (
        -torch.arange(0, D, 2, dtype=x.dtype) / D
    )
    angle = angle * (base is not None)
    turn = torch.polar(torch.ones_like(angle), angle)
    heads = []
    for i in range(branch.n_heads):
        rows = slice(i * D, (i + 1) * D)
        q, k, v = (z @ w[rows].T for z, w in ((x, wq), (y, wk), (y, wv)))
        if qk_norm:
            q, k = rms_norm(q, eps=eps), rms_norm(k, eps=eps)
        q, k = (torch.complex(z[..., : D // 2], z[..., D // 2 :]) * turn for z in (q, k))
        scores = (q @ k.conj().transpose(-1, -2)).real / math.sqrt(D)
        hidden = torch.ones(T, T, dtype=torch.bool).triu(1 if causal else T)
        if seen is not None:
            hidden = hidden | ~(seen[:, None, :] | torch.eye(T, dtype=torch.bool))
        heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v)
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


def plain_branch(branch, x, config, loop=0, seen=None, y=None):
    if isinstance(branch, Attention):
        c = config
        return plain_attention(branch, x, c.qk_norm, c.rope_base, c.norm_eps, seen, y)
    if isinstance(branch, SwiGLU):
        return plain_swiglu(branch, x)
    return plain_moe(branch, x, branch.routers[min(loop, len(branch.routers) - 1)])


def plain_injection(model, s, e, loop):
    """The injections from their definitions (Huginn's adapter on [s; e], Parcae's recurrence)."""
    c, inject = model.config, model.borders.injection
    skips = loop == 0 and c.start == "embedding"
    if c.inject == "add":
        return s if skips else s + e
    if c.inject == "convex":
        g = min(1.0, 0.5 / ((loop + 1) * c.n_layers**0.5))
        return s if skips else (1 - g) * s + g * e
    if c.inject == "adapter":
        return torch.cat([s, e], -1) @ inject.linear.weight.T
    if c.inject == "contractive":
        dt = (1 + inject.raw_step.exp()).log()
        return torch.exp(-dt * inject.log_rate.exp()) * s + dt * (e @ inject.linear.weight.T)
    return s


def plain_signal(loop, d):
    t = loop + 1
    angles = [t / 10000 ** (k / (d // 2)) for k in range(d // 2)]
    values = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(values, dtype=torch.float64)


def plain_modulation(model, loop, j):
    """Factors of a sublayer's input and output: 1 + a linear map of a SiLU layer."""
    modulation, d = model.borders.modulation, model.config.d_model
    if modulation is None:
        return 1.0, 1.0
    y = modulation.hidden.weight @ plain_signal(loop, d) + modulation.hidden.bias
    y = modulation.factors.weight @ (y * torch.sigmoid(y)) + modulation.factors.bias
    return 1 + y[2 * j * d : (2 * j + 1) * d], 1 + y[(2 * j + 1) * d : (2 * j + 2) * d]


def plain_norm(model, h, gain):
    """The norm before a branch or the head, where the rule has one."""
    if not model.rule.norms_input:
        return h if gain is None else h * gain
    return rms_norm(h, gain, model.config.norm_eps)


def plain_blocks(model, s, sublayers, loop, seen=None, first=None):
    """Some blocks; loop is None outside of the loops, the rest as in `plain_loop`."""
    for j, sublayer in enumerate(sublayers):
        scale, gate = (1.0, 1.0) if loop is None else plain_modulation(model, loop, j)
        n = plain_norm(model, s.h, sublayer.gain_in) * scale
        y = None if first is None else first.setdefault(j, n)
        f = plain_branch(sublayer.branch, n, model.config, loop or 0, seen, y) * gate
        s = model.rule.reference(s, f, Visit(loop, j // 2, j, sublayer, None))
    return s


def plain_start(model, tokens, keys=None):
    """The loops' input, and the state before the first of them."""
    c, rule = model.config, model.rule
    gain = model.norm_embed and model.norm_embed.weight
    s = LoopState(rule.embed(model.embed_tokens.weight[tokens], gain))
    s = plain_blocks(model, s, model.prelude, None)
    e = s.h
    if c.input_norm:
        e = rms_norm(e, model.borders.norm_input.weight, c.norm_eps)
        s = s._replace(h=e)
    if c.start == "noise":
        keys = torch.zeros(len(tokens), dtype=torch.int64) if keys is None else keys
        s = LoopState(truncated_normal(keys, range(tokens.shape[1]), c.d_model, c.start_std).to(e))
    return e, s


def plain_loop(model, s, e, loop, seen=None, first=None):
    """One loop of every token with all that is at its borders.

    seen: as in `plain_attention`.
    first: by sublayer, the inputs in the first loop, of which all loops make keys and values; an
        empty dict then. None: each loop's own.
    """
    c = model.config
    h = s.h + plain_signal(loop, c.d_model) if c.loop_signal == "add" else s.h
    s = s._replace(h=plain_injection(model, h, e, loop))
    s = model.rule.start_reference(s, e, loop)
    s = plain_blocks(model, s, model.sublayers, loop, seen, first)
    if c.loop_norm == "each":
        s = s._replace(h=rms_norm(s.h, model.final_gain, c.norm_eps))
    return s


def plain_readout(model, s):
    """Final normalised states [B, T, d_model] of the state after some loops."""
    c = model.config
    if c.readout_map:
        s = s._replace(h=s.h @ model.borders.readout.weight.T)
    if c.loop_norm == "last":
        s = s._replace(h=rms_norm(s.h, model.final_gain, c.norm_eps))
    if c.loop_norm != "none" and not model.coda:
        return s.h
    return plain_norm(model, plain_blocks(model, s, model.coda, None).h, model.final_gain)


def plain_forward(model: LoopLM, tokens, loops=None, keys=None):
    """Final normalised states [B, T, d_model], from a model's weights and its rule's reference.

    The norms before branches and head are written here, those of the rule in its reference.
    """
    e, s = plain_start(model, tokens, keys)
    for loop in range(model.config.loops if loops is None else loops):
        s = plain_loop(model, s, e, loop)
    return plain_readout(model, s)


def check_gradients(model: LoopLM, tokens, plain=plain_forward, **tolerance):
    """Compare a model's final states and all gradients with the plain model's."""
    n, wanted = model(tokens), plain(model, tokens)
    torch.testing.assert_close(n, wanted, **tolerance)
    direction = torch.randn(n.shape, dtype=n.dtype, generator=torch.Generator().manual_seed(2))
    parameters = dict(model.named_parameters())
    parameters.pop("lm_head.weight", None)  # used after the final states
    ours, theirs = (
        torch.autograd.grad((x * direction).sum(), list(parameters.values()), allow_unused=True)
        for x in (n, wanted)
    )
    for name, a, b in zip(parameters, ours, theirs, strict=True):
        assert (a is None) == (b is None), name
        if a is None:  # an exit gate, which final states do not read
            assert name.startswith("depth"), name
            continue
        torch.testing.assert_close(a, b, **tolerance, msg=lambda m, n=name: f"{n}: {m}")
