"""A LOOM written out plainly: every expert on every token, both memories from their definition."""

import dataclasses

import torch

from deeploop.config import LoomConfig, ModelConfig, MoEConfig
from deeploop.model.attention import rope_tables
from deeploop.model.looplm import LoopLM
from tests.helpers.plain_model import EPS, ROPE_BASE, plain_attention, plain_swiglu, rms_norm


def small(loom=None, moe=None, **changes) -> ModelConfig:
    base = ModelConfig(
        residual="loom",
        d_model=16,
        n_layers=2,
        loops=3,
        n_heads=2,
        vocab_size=31,
        seq_len=16,
        norm_eps=EPS,
        rope_base=ROPE_BASE,
        embed_std=0.25,
        loom=LoomConfig(**(loom or {})),
        moe=MoEConfig(
            **{"experts": 4, "top_k": 2, "d_expert": 8, "shared": 2, "capacity_factor": 0.0}
            | (moe or {})
        ),
    )
    return dataclasses.replace(base, **changes)


def build(config: ModelConfig, seed: int = 0) -> LoopLM:
    """A float64 model in which no two routers, gains or biases are alike."""
    torch.manual_seed(seed)
    model = LoopLM(config).double()
    model.cos, model.sin = rope_tables(config.seq_len, config.d_model // config.n_heads, ROPE_BASE)
    for name, p in model.named_parameters():
        if "gain" in name:
            p.data.uniform_(0.5, 1.5)
        if "router" in name:
            p.data.normal_()
    for name, b in model.named_buffers():
        if name.endswith("bias"):
            b.uniform_(-0.3, 0.3)
    return model


def plain_moe(moe, n, router):
    """Top-k by sigmoid + bias; weights without it; every expert run on every token."""
    score = torch.sigmoid(n @ router.T)
    chosen = (score + moe.bias).topk(moe.top_k, dim=-1).indices
    weights = torch.zeros_like(score).scatter(-1, chosen, score.gather(-1, chosen))
    weights = weights / weights.sum(-1, keepdim=True)
    f = plain_swiglu(moe.shared, n)
    for e in range(score.shape[-1]):
        gate, up = (n @ moe.gate_up[e].T).chunk(2, -1)
        out = (gate * torch.sigmoid(gate) * up) @ moe.down[e].T
        f = f + weights[..., e, None] * out
    return f


def plain_loom(model: LoopLM, tokens, source="output", carry="raw", seen=None):
    """Final normalised states; gamma and g_t as arXiv 2610.01153 states them."""
    c = model.config
    m, loops, decay, lam = c.n_layers, c.loops, 0.5, 0.5
    gamma = lam / (loops * m**0.5)
    x = model.embedding.weight[tokens] / c.embed_std
    h, global_sum, global_weight = x, 0.0, 0.0
    for t in range(1, loops + 1):
        if t > 1:
            if carry == "normalised":
                h = rms_norm(h)
            g = lam / (t * m**0.5)
            h = (1 - g) * h + g * x
        local_sum, local_weight = 0.0, 0.0
        for layer in range(m):
            attention, experts = model.sublayers[2 * layer : 2 * layer + 2]
            o = gamma * plain_attention(attention.branch, rms_norm(h))
            local_sum, local_weight = decay * local_sum + o, decay * local_weight + 1
            fed = o if source == "output" else local_sum / local_weight
            global_sum, global_weight = decay * global_sum + fed, decay * global_weight + 1
            h = h + global_sum / global_weight + local_sum / local_weight
            if seen is not None:
                seen.append((h, o))
            f = plain_moe(experts.branch, rms_norm(h), experts.branch.routers[t - 1])
            h = h + gamma * rms_norm(f) * experts.gain_out
    return rms_norm(h)
