"""Parts of a Transformer from their definitions, to compare the models with."""

import math

import torch

# Not the defaults, so that a value written into the code shows.
EPS, ROPE_BASE = 1e-2, 100.0


def rms_norm(x, gain=None):
    y = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    return y if gain is None else y * gain


def plain_attention(branch, x, qk_norm=False):
    """Attention from its definition: one head at a time, complex-number RoPE."""
    T, d = x.shape[1:]
    D = branch.head_dim
    wq, wk, wv = branch.qkv.weight.split(d)
    angle = torch.arange(T, dtype=x.dtype)[:, None] * ROPE_BASE ** (
        -torch.arange(0, D, 2, dtype=x.dtype) / D
    )
    turn = torch.polar(torch.ones_like(angle), angle)
    heads = []
    for i in range(branch.n_heads):
        rows = slice(i * D, (i + 1) * D)
        q, k, v = (x @ w[rows].T for w in (wq, wk, wv))
        if qk_norm:
            q, k = rms_norm(q), rms_norm(k)
        q, k = (torch.complex(z[..., : D // 2], z[..., D // 2 :]) * turn for z in (q, k))
        scores = (q @ k.conj().transpose(-1, -2)).real / math.sqrt(D)
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
    return torch.cat(heads, -1) @ branch.out.weight.T


def plain_swiglu(branch, x):
    gate, up = (x @ branch.gate_up.weight.T).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ branch.out.weight.T
