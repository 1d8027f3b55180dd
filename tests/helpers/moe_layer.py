"""A mixture of experts on its own: small modules, and the same written out plainly."""

import torch
import torch.nn.functional as F

from deeploop.kernels import expert_combine
from deeploop.model.moe.layer import MoE

SCALE, EPS = 0.3, 1e-5
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def make(n_experts=5, top_k=2, n_shared=2, capacity=0.0, backend="grouped_mm", d=6, f=4, routers=3):
    """A small float64 layer whose routers differ."""
    moe = MoE(d, n_experts, top_k, f, n_shared, routers, capacity, backend).double()
    with torch.no_grad():
        for router in moe.routers:
            router.copy_(torch.randn_like(router))
        moe.bias.copy_(0.2 * torch.randn_like(moe.bias))
    return moe


def swiglu(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up) @ down.T


def dense(moe, h, n, loop, w_branch, w_next):
    """h' and n': all experts on all tokens, one weight per (token, expert), zero unless kept."""
    E, x = len(moe.bias), n.reshape(-1, n.shape[-1])
    logits = x @ moe.routers[min(loop, len(moe.routers) - 1)].T
    score = logits.sigmoid()
    order = (score.detach() + moe.bias).sort(dim=-1, descending=True, stable=True).indices
    chosen = F.one_hot(order[:, : moe.top_k], E).sum(1).bool()
    share = (score * chosen) / (score * chosen).sum(-1, keepdim=True)
    if moe.training and moe.capacity_factor:
        kept = chosen.clone()
        cap = max(1, int(moe.capacity_factor * len(x) * moe.top_k / E))
        for e in range(E):
            waiting = [t for t in range(len(x)) if chosen[t, e]]
            waiting.sort(key=lambda t: (-share[t, e].item(), t))
            for t in waiting[cap:]:
                kept[t, e] = False
        share = share * kept
        share = share / share.sum(-1, keepdim=True).clamp(min=1e-9)
    y = torch.zeros_like(x)
    for e in range(E):
        y = y + share[:, e, None] * swiglu(x, moe.gate_up[e], moe.down[e])
    if moe.shared is not None:
        y = y + swiglu(x, moe.shared.gate_up.weight, moe.shared.out.weight)
    norm = lambda v: v / (v.square().mean(-1, keepdim=True) + EPS).sqrt()  # noqa: E731
    h_new = h + SCALE * norm(y.view(h.shape)) * w_branch
    return h_new, norm(h_new) * w_next, logits.logsumexp(-1).square().sum() / max(1, len(x))


def ours(moe, h, n, loop, w_branch, w_next):
    routed = moe(n, moe.router(loop))
    return *expert_combine(h, *routed[:4], w_branch, w_next, SCALE, EPS), routed.z


def results(layer, moe, inputs, loop=1):
    """Outputs, and the gradients of inputs and parameters (None where there is none)."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    moe.zero_grad(set_to_none=True)
    outputs = layer(moe, leaves[0], leaves[1], loop, *leaves[2:])
    generator = torch.Generator().manual_seed(1)
    loss = sum(
        (y.double() * torch.randn(y.shape, generator=generator, dtype=torch.float64)).sum()
        for y in outputs
    )
    loss.backward()
    gradients = {name: p.grad for name, p in moe.named_parameters()}
    return [y.detach() for y in outputs], [x.grad for x in leaves], gradients


def inputs_for(*shape, dtype=torch.float64):
    d = shape[-1]
    return [torch.randn(s, dtype=dtype) for s in (shape, shape, (d,), (d,))]
