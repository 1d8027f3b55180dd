"""Measure one state of a model: its visits' gradients, its stream, the size of its next step.

The update is the run's next AdamW step (with its moments, learning rate, clipping and decay)
from the gradient of the held-out batch, taken only on the weights that all loops share:

    measured   RMS of F(theta + dtheta) - F(theta), F the final normalised states
    bound      sum_j |sum_r U_rj| |dtheta_j|: the largest possible value, to first order
    random     sqrt(sum_j |sum_r U_rj|^2 |dtheta_j|^2 / numel theta_j): the expected value for
               steps of these lengths in random directions

j counts the branches and, separately, the gains of each sublayer. See
`deeploop.analyze.diagnose.per_loop`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deeploop.analyze.diagnose.per_loop import (
    ParamGroup,
    PerLoopModel,
    cosines,
    directional_kappas,
    gradients,
    gram,
    kappas,
    norm_of_sum,
    norms,
    per_loop_model,
    run_per_loop,
)
from deeploop.config import Config, ModelConfig, scaling
from deeploop.data.batches import IGNORE
from deeploop.model.looplm import LoopLM
from deeploop.model.loss import linear_cross_entropy
from deeploop.model.state import Visit
from deeploop.train.metrics import load_spread, router_overlap
from deeploop.train.optim import learning_rate
from deeploop.train.step import apply_gradients


class Batch(NamedTuple):
    """The held-out batch of a diagnosis, and the random probes of its Jacobian."""

    tokens: Tensor  # int64 [B, T]
    targets: Tensor  # int64 [B, T]
    probes: int
    seed: int  # of the probes


class Measurement(NamedTuple):
    """Figures of one state, as tensors; groups are 2K branches, then the gains of 2K sublayers."""

    loss: Tensor  # nats per target
    stream: Tensor  # [R, 2K, 3]: RMS, variance, variance between tokens; see `moments`
    loads: Tensor | None  # int64 [R, K, experts]
    g: Tensor  # float64 [4K, R, R]: Gram matrices of G, by group
    u: Tensor  # float64 [probes, 4K, R, R]: of v^T U; the mean over probes estimates that of U
    steps: Tensor  # float64 [4K]: |dtheta| of each group
    sizes: list[int]  # [4K]: numel of each group
    output_change: Tensor  # RMS of F(theta + dtheta) - F(theta)


def measure_state(
    model: LoopLM, optimizer: torch.optim.Optimizer, config: Config, step: int, batch: Batch
) -> Measurement:
    """Measure a model after `step` steps of training; then takes the next step on its weights.

    One autograd graph serves 1 + probes backwards; at any time the R gradients of every
    sublayer exist for one of them.
    """
    model.train()  # experts then have the capacity of training
    c, copies = config.model, per_loop_model(model)
    groups = copies.branches + copies.gains
    shared = {id(p) for group in groups for p in group.params}
    others = [p for p in model.parameters() if id(p) not in shared]
    stream: list[Tensor] = []

    def on_visit(visit: Visit, h: Tensor) -> None:
        if visit.loop is not None:
            stream.append(moments(h.detach()))

    s, n = run_per_loop(model, copies.sublayers, batch.tokens, on_visit)
    loss = linear_cross_entropy(n, model.head, batch.targets) / (batch.targets != IGNORE).sum()
    total = loss if s.router_z is None else loss + c.moe.z_loss * s.router_z
    by_group, rest = gradients(total, groups, others)
    g = torch.stack([gram(by_loop) for by_loop in by_group])
    set_gradients(groups, by_group, others, rest)
    del by_group, rest
    u = torch.stack([*probe_jacobian(n, groups, batch)])
    before = n.detach()
    loads = torch.stack(s.expert_loads).view(c.loops, c.n_layers, -1) if s.expert_loads else None
    del s, n, total
    steps = take_step(model, optimizer, config, step, groups, others)
    return Measurement(
        loss.detach(),
        torch.stack(stream).view(c.loops, -1, 3),
        loads,
        g,
        u,
        steps,
        [sum(p.numel() for p in group.params) for group in groups],
        output_change(model, copies, batch, before),
    )


def moments(h: Tensor) -> Tensor:
    """Return RMS, variance and variance between tokens of a stream [B, T, d]: float32 [3].

    The variance is over the features of a token, then the mean over tokens. The variance
    between tokens is over tokens, then the mean over features: 0 means that all tokens have
    become alike.
    """
    x = h.float().flatten(0, -2)
    rms = x.square().mean().sqrt()
    return torch.stack((rms, x.var(-1, correction=0).mean(), x.var(0, correction=0).mean()))


def set_gradients(
    groups: list[ParamGroup],
    by_group: list[list[list[Tensor]]],
    others: list[nn.Parameter],
    rest: list[Tensor],
) -> None:
    """Set the model's ordinary gradient: for shared parameters the sum over their visits."""
    for group, by_loop in zip(groups, by_group, strict=True):
        for p, grads in zip(group.params, zip(*by_loop, strict=True), strict=True):
            p.grad = torch.stack(grads).sum(0)
    for p, grad in zip(others, rest, strict=True):
        p.grad = grad


def probe_jacobian(n: Tensor, groups: list[ParamGroup], batch: Batch) -> Iterator[Tensor]:
    """Yield the Gram matrices of v^T U, float64 [4K, R, R], for each of `probes` random v."""
    draw = torch.Generator().manual_seed(batch.seed)
    for _ in range(batch.probes):
        v = torch.randn(n.shape, generator=draw, dtype=n.dtype, device="cpu") / n.numel() ** 0.5
        by_group, _ = gradients(n, groups, weight=v.to(n.device))
        yield torch.stack([gram(by_loop) for by_loop in by_group])


def take_step(
    model: LoopLM,
    optimizer: torch.optim.Optimizer,
    config: Config,
    step: int,
    groups: list[ParamGroup],
    others: list[nn.Parameter],
) -> Tensor:
    """Step the shared parameters alone; returns |dtheta| of each group, float64 [4K]."""
    before = [[p.detach().clone() for p in group.params] for group in groups]
    apply_gradients(model, optimizer, config.train.clip, next_rate(config, step), exclude=others)
    changes = (
        [p.detach() - b for p, b in zip(group.params, old, strict=True)]
        for group, old in zip(groups, before, strict=True)
    )
    return torch.stack([nn.utils.get_total_norm(change).double().cpu() for change in changes])


def next_rate(config: Config, step: int) -> float:
    """Return the learning rate of the next step; of a complete run the last but one step's.

    The last step's is train.min_lr, by default 0, which would move nothing.
    """
    return learning_rate(min(step, max(config.train.steps - 2, 0)), config.train)


@torch.no_grad()
def output_change(model: LoopLM, copies: PerLoopModel, batch: Batch, before: Tensor) -> Tensor:
    """Return the RMS of the change of the final states since `before`."""
    _, n = run_per_loop(model, copies.sublayers, batch.tokens)
    return (n - before).double().square().mean().sqrt()


def as_figures(m: Measurement, config: Config, step: int) -> dict[str, Any]:
    """Return the figures of one state as diagnose.json has them.

    Lists are by loop and sublayer, loss in nats per token. Some of the keys:

        kappa_by_probe      kappa from each probe alone: the spread of the estimate
        kappa_directional   kappa of the visits' directions alone
        gamma               log kappa / log R, assuming kappa = R^gamma (no fit over several R)
        p                   (1 + gamma)/4, for rules whose scales have an exponent
        sublayer            where kappa is largest
        cosine              mean over sublayers and pairs of loops
        c_u, c_g            the bound's constants
    """
    c, u = config.model, m.u.mean(0)
    branches = 2 * c.n_layers
    by_sublayer = kappas(u[:branches], m.g[:branches])
    worst = int(by_sublayer.argmax())
    kappa = float(by_sublayer[worst])
    gamma = scaling.alignment_growth(kappa, c.loops) if c.loops > 1 and kappa > 0 else None
    figures: dict[str, Any] = {
        "step": step,
        "loss": float(m.loss),
        "kappa": kappa,
        "kappa_by_probe": [float(kappas(p[:branches], m.g[:branches]).max()) for p in m.u],
        "kappa_directional": float(directional_kappas(u[:branches], m.g[:branches]).max()),
        "gamma": gamma,
        "p": None if gamma is None or c.exponent is None else scaling.threshold_exponent(gamma),
        "sublayer": sublayer_name(c, worst),
        "cosine": mean_between_loops(cosines(m.g[:branches]).mean(0)),
        "c_u": float(norms(u[:branches]).max()) * c.alpha / c.beta,
        "c_g": float(norms(m.g[:branches]).max()) * c.alpha / c.beta,
        "branches": sublayer_figures(c, u[:branches], m.g[:branches]),
        "gains": sublayer_figures(c, u[branches:], m.g[branches:]),
        "update": update_size(m, u, next_rate(config, step)),
    }
    for i, name in enumerate(("rms", "variance", "variance_between_tokens")):
        figures[name] = m.stream[..., i].tolist()
    if c.exponent is not None:
        figures["budget"] = budget(c, kappa)
    if m.loads is not None:
        figures |= {
            "loads": m.loads.tolist(),
            "router_overlap": router_overlap(m.loads.cpu()).tolist(),
            "load_spread": load_spread(m.loads.cpu()).tolist(),
        }
    return figures


def sublayer_figures(c: ModelConfig, u: Tensor, g: Tensor) -> list[dict[str, Any]]:
    """Return for each sublayer kappa, and norms and cosines of its visits' G and U."""
    columns = {
        "kappa": kappas(u, g),
        "kappa_directional": directional_kappas(u, g),
        "g": norms(g),
        "g_sum": norm_of_sum(g),
        "g_cosines": cosines(g),
        "u": norms(u),
        "u_sum": norm_of_sum(u),
        "u_cosines": cosines(u),
    }
    return [
        {"sublayer": sublayer_name(c, j)} | {key: x[j].tolist() for key, x in columns.items()}
        for j in range(len(g))
    ]


def sublayer_name(c: ModelConfig, j: int) -> str:
    """Name sublayer j by its block, counted from 1, and its kind: "2 attention"."""
    kind = ("MoE" if c.moe.experts else "SwiGLU") if j % 2 else "attention"
    return f"{j // 2 + 1} {kind}"


def mean_between_loops(matrix: Tensor) -> float | None:
    """Return the mean over pairs of different loops; None where there is one loop."""
    R = len(matrix)
    return float((matrix.sum() - matrix.trace()) / (R * (R - 1))) if R > 1 else None


def update_size(m: Measurement, u: Tensor, lr: float) -> dict[str, float | None]:
    """Return the measured change of the outputs and its bounds; see the top of this file."""
    sizes = torch.tensor(m.sizes, dtype=torch.float64).clamp_min(1)
    bound = float((norm_of_sum(u) * m.steps).sum())
    return {
        "lr": lr,
        "measured": float(m.output_change),
        "bound": bound,
        "bound_untied": float((norms(u).sum(-1) * m.steps).sum()),
        "random": float((norm_of_sum(u).square() * m.steps.square() / sizes).sum().sqrt()),
        "measured_over_bound": float(m.output_change) / bound if bound else None,
    }


def budget(c: ModelConfig, kappa: float) -> dict[str, float]:
    """Return M kappa_R (beta/alpha)^2: measured, without alignment and with full alignment.

    The factor C_U C_G is left out, because training changes it (`c_u`, `c_g`).
    """
    assert c.exponent is not None
    looped = c.n_layers * c.loops / c.n_blocks  # share of the blocks that loops run again
    untied = looped * scaling.untied_budget(c.n_blocks, c.exponent)
    aligned = c.loops * untied
    return {"measured": kappa * untied, "untied": untied, "aligned": aligned}
