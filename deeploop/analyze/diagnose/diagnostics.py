"""One state of a model, read: its visits' gradients, its stream, the size of its next step.

The update is the run's own next AdamW step (its moments, learning rate, clipping and decay)
with the gradient of the batch at hand, taken on the weights that all loops share and on no
others:

    measured   RMS of F(theta + dtheta) - F(theta), F the final normalised states
    bound      sum_j |sum_r U_rj| |dtheta_j|: the most it can be, to first order
    random     sqrt(sum_j |sum_r U_rj|^2 |dtheta_j|^2 / numel theta_j): what steps of these
               lengths in random directions would make it

j counts the branches and, apart, the gains of each sublayer. See `deeploop.analyze.diagnose.per_loop`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deeploop.analyze.diagnose.per_loop import (
    Apart,
    Part,
    apart,
    cosines,
    directional,
    gradients,
    gram,
    joint,
    kappas,
    norms,
    run_apart,
)
from deeploop.config import Config, ModelConfig, scaling
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.model.visits import Visit
from deeploop.train.metrics import overlap, spread
from deeploop.train.optim import clip_gradients, learning_rate, step_if_finite


class Batch(NamedTuple):
    """What every reading of a diagnosis is taken on."""

    tokens: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B, T]
    probes: int
    seed: int  # of the probes


class Measured(NamedTuple):
    """One state of a model, still in tensors; parts are 2K branches, then 2K pairs of gains."""

    loss: Tensor  # nats per token
    stream: Tensor  # [R, 2K, 3]: RMS, variance, variance between tokens; see `moments`
    loads: Tensor | None  # int64 [R, K, experts]
    g: Tensor  # float64 [4K, R, R]: Gram matrices of G, by part
    u: Tensor  # float64 [probes, 4K, R, R]: of v^T U, whose mean over probes is that of U
    steps: Tensor  # float64 [4K]: |dtheta| of each part
    sizes: list[int]  # [4K]: numel of each part
    moved: Tensor  # RMS of F(theta + dtheta) - F(theta)


def measure(
    model: LoopLM, optimizer: torch.optim.AdamW, config: Config, step: int, batch: Batch
) -> Measured:
    """Diagnose a model that has taken `step` steps; its weights are then a step further on.

    One graph is kept for 1 + probes backwards. At any time there are the R gradients of
    every sublayer of one of them.
    """
    model.train()  # with the capacity of experts that the trained loss has
    c, views = config.model, apart(model)
    parts = views.branches + views.gains
    shared = {id(p) for part in parts for p in part.own}
    others = [p for p in model.parameters() if id(p) not in shared]
    seen: list[Tensor] = []

    def watch(visit: Visit, h: Tensor) -> None:
        seen.append(moments(h.detach()))

    s = run_apart(model, views.loops, batch.tokens, watch)
    assert s.n is not None
    loss = linear_cross_entropy(s.n, model.head, batch.targets) / batch.targets.numel()
    total = loss if s.z is None else loss + c.moe.z_loss * s.z
    by_part, rest = gradients(total, parts, others)
    g = torch.stack([gram(visits) for visits in by_part])
    hand_over(parts, by_part, others, rest)
    del by_part, rest
    u = torch.stack([*probe(s.n, parts, batch)])
    before = s.n.detach()
    loads = torch.stack(s.loads).view(c.loops, c.n_layers, -1) if s.loads else None
    del s, total
    steps = take_step(model, optimizer, config, step, parts, others)
    return Measured(
        loss.detach(),
        torch.stack(seen).view(c.loops, -1, 3),
        loads,
        g,
        u,
        steps,
        [sum(p.numel() for p in part.own) for part in parts],
        moved(model, views, batch, before),
    )


def moments(h: Tensor) -> Tensor:
    """RMS, variance and variance between tokens of a stream [B, T, d]: float32 [3].

    The second is over the features of a token, the mean over tokens; the third over tokens,
    the mean over features: where it falls to 0 all tokens have become alike.
    """
    x = h.float().flatten(0, -2)
    rms = x.square().mean().sqrt()
    return torch.stack((rms, x.var(-1, correction=0).mean(), x.var(0, correction=0).mean()))


def hand_over(
    parts: list[Part],
    by_part: list[list[list[Tensor]]],
    others: list[nn.Parameter],
    rest: list[Tensor],
) -> None:
    """Give the model its ordinary gradient: of shared parameters the sum over their visits."""
    for part, visits in zip(parts, by_part, strict=True):
        for p, found in zip(part.own, zip(*visits, strict=True), strict=True):
            p.grad = torch.stack(found).sum(0)
    for p, grad in zip(others, rest, strict=True):
        p.grad = grad


def probe(n: Tensor, parts: list[Part], batch: Batch) -> Iterator[Tensor]:
    """Gram matrices of v^T U for one random v after another: float64 [4K, R, R] each."""
    draw = torch.Generator().manual_seed(batch.seed)
    for _ in range(batch.probes):
        v = torch.randn(n.shape, generator=draw, dtype=n.dtype, device="cpu") / n.numel() ** 0.5
        by_part, _ = gradients(n, parts, weight=v.to(n.device))
        yield torch.stack([gram(visits) for visits in by_part])


def take_step(
    model: LoopLM,
    optimizer: torch.optim.AdamW,
    config: Config,
    step: int,
    parts: list[Part],
    others: list[nn.Parameter],
) -> Tensor:
    """The optimizer's step on the shared parameters alone; returns |dtheta| by part, float64."""
    before = [[p.detach().clone() for p in part.own] for part in parts]
    norm = clip_gradients(model, config.train.clip)
    for p in others:
        p.grad = None
    step_if_finite(optimizer, norm, rate(config, step))
    optimizer.zero_grad(set_to_none=True)
    changes = (
        [p.detach() - b for p, b in zip(part.own, old, strict=True)]
        for part, old in zip(parts, before, strict=True)
    )
    return torch.stack([nn.utils.get_total_norm(change).double().cpu() for change in changes])


def rate(config: Config, step: int) -> float:
    """The learning rate of the step after `step`; behind a run's last one, of that."""
    return learning_rate(min(step, config.train.steps - 1), config.train)


@torch.no_grad()
def moved(model: LoopLM, views: Apart, batch: Batch, before: Tensor) -> Tensor:
    """RMS of the change of the final states."""
    n = run_apart(model, views.loops, batch.tokens).n
    assert n is not None
    return (n - before).double().square().mean().sqrt()


def figures(m: Measured, config: Config, step: int) -> dict[str, Any]:
    """What diagnose.json says of one state.

    kappa, its value for each probe alone (how far the estimate is off), the same of the
    visits' directions alone; gamma = log kappa / log R, which takes kappa for R^gamma and
    no fit over several R, and for the residuals whose scales have an exponent p = (1 + gamma)/4;
    the sublayer where kappa is largest; cosine, the mean over sublayers and pairs of loops;
    c_u and c_g, the bound's constants. Lists by loop and sublayer, loss in nats per token.
    """
    c, u = config.model, m.u.mean(0)
    branches = 2 * c.n_layers
    by_sublayer = kappas(u[:branches], m.g[:branches])
    worst = int(by_sublayer.argmax())
    kappa = float(by_sublayer[worst])
    gamma = scaling.alignment_growth(kappa, c.loops) if c.loops > 1 and kappa > 0 else None
    found: dict[str, Any] = {
        "step": step,
        "loss": float(m.loss),
        "kappa": kappa,
        "kappa_by_probe": [float(kappas(p[:branches], m.g[:branches]).max()) for p in m.u],
        "kappa_directional": float(directional(u[:branches], m.g[:branches]).max()),
        "gamma": gamma,
        "p": None if gamma is None or c.exponent is None else scaling.threshold_exponent(gamma),
        "sublayer": sublayer_name(c, worst),
        "cosine": apart_mean(cosines(m.g[:branches]).mean(0)),
        "c_u": float(norms(u[:branches]).max()) * c.alpha / c.beta,
        "c_g": float(norms(m.g[:branches]).max()) * c.alpha / c.beta,
        "branches": sharing(c, u[:branches], m.g[:branches]),
        "gains": sharing(c, u[branches:], m.g[branches:]),
        "update": update_size(m, u, rate(config, step)),
    }
    for i, name in enumerate(("rms", "variance", "variance_between_tokens")):
        found[name] = m.stream[..., i].tolist()
    if c.exponent is not None:
        found["budget"] = budget(c, kappa)
    if m.loads is not None:
        found |= {
            "loads": m.loads.tolist(),
            "router_overlap": overlap(m.loads.cpu()).tolist(),
            "load_spread": spread(m.loads.cpu()).tolist(),
        }
    return found


def sharing(c: ModelConfig, u: Tensor, g: Tensor) -> list[dict[str, Any]]:
    """By sublayer: its kappas, its visits' norms and those of their sums, cosines of G and U."""
    columns = {
        "kappa": kappas(u, g),
        "kappa_directional": directional(u, g),
        "g": norms(g),
        "g_sum": joint(g),
        "g_cosines": cosines(g),
        "u": norms(u),
        "u_sum": joint(u),
        "u_cosines": cosines(u),
    }
    return [
        {"sublayer": sublayer_name(c, j)} | {key: x[j].tolist() for key, x in columns.items()}
        for j in range(len(g))
    ]


def sublayer_name(c: ModelConfig, j: int) -> str:
    kind = ("MoE" if c.moe.experts else "SwiGLU") if j % 2 else "attention"
    return f"{j // 2 + 1} {kind}"


def apart_mean(matrix: Tensor) -> float | None:
    """Mean over pairs of different loops; None where there is one loop."""
    R = len(matrix)
    return float((matrix.sum() - matrix.trace()) / (R * (R - 1))) if R > 1 else None


def update_size(m: Measured, u: Tensor, lr: float) -> dict[str, float | None]:
    """The step's effect, and what it is held against; see the top of this file."""
    sizes = torch.tensor(m.sizes, dtype=torch.float64).clamp_min(1)
    bound = float((joint(u) * m.steps).sum())
    return {
        "lr": lr,
        "measured": float(m.moved),
        "bound": bound,
        "bound_untied": float((norms(u).sum(-1) * m.steps).sum()),
        "random": float((joint(u).square() * m.steps.square() / sizes).sum().sqrt()),
        "measured_over_bound": float(m.moved) / bound if bound else None,
    }


def budget(c: ModelConfig, kappa: float) -> dict[str, float]:
    """M kappa_R (beta/alpha)^2, beside what it is with no alignment and with all of it.

    Without the factor C_U C_G, which training changes (`c_u`, `c_g`).
    """
    assert c.exponent is not None
    untied = scaling.untied_budget(c.n_layers * c.loops, c.exponent)
    aligned = scaling.aligned_budget(c.n_layers, c.loops, c.exponent)
    return {"measured": kappa * untied, "untied": untied, "aligned": aligned}
