"""Measure how far the gradients of a shared weight's visits add up: kappa_R.

For visit r (one of R loops) of sublayer j, whose branch has the parameters phi_j:

    G_rj = d loss / d phi_j   through visit r alone    loss: as trained, nats per token
    U_rj = d F / d phi_j      through visit r alone    F: final normalised states [B, T, d_model]

Over r they add up to the ordinary gradient and the ordinary Jacobian, and a step along
-sum_r G_rj moves F, to first order, by at most sum_j |sum_r U_rj| |sum_r G_rj| a unit of
learning rate. DeepLoop (arXiv 2607.13491) bounds each visit by |U_rj| <= C_U beta/alpha and
|G_rj| <= C_G beta/alpha, and measures the effect of sharing by

    kappa_R = max_j |sum_r U_rj| |sum_r G_rj| / (R C_U C_G (beta/alpha)^2)     from 0 to R

It is 1 where visits of equal norm are orthogonal, and R where they are equal; if it grows as
R^gamma, the smallest stable exponent is p = (1 + gamma)/4. The paper does not measure it. Where
the paper leaves the terms open, this file reads them as follows:

    U     the Jacobian as above. |U| is its Frobenius norm over sqrt(numel F), estimated
          without bias by probes v ~ N(0, 1/numel F): E |v^T U|^2 = |U|_F^2 / numel F. A
          worst-case bound would use the operator norm instead.
    C_U   C_U beta/alpha is the largest |U_rj| of all visits, C_G beta/alpha the largest
          |G_rj|: the smallest constants for which the bound holds, and kappa_R <= R with it.
    phi_j the branch's parameters that all loops share, without norm gains, which do not
          belong to f_j, and without a router that only one loop has.

All figures follow from inner products of the visits' gradients: Gram matrices [R, R].
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deeploop.model.looplm import LoopLM
from deeploop.model.moe.layer import MoE
from deeploop.model.state import LoopState, OnVisit
from deeploop.model.sublayer import Sublayer


class ParamGroup(NamedTuple):
    """Parameters of a sublayer that all loops share, and a copy of each for every loop."""

    params: list[nn.Parameter]
    by_loop: list[list[nn.Parameter]]  # leaves with separate gradients, on the same storage


class PerLoopModel(NamedTuple):
    """Copies of a model's sublayers for each loop, on the model's storage."""

    sublayers: list[list[Sublayer]]  # [R][2K]
    branches: list[ParamGroup]  # [2K]
    gains: list[ParamGroup]  # [2K]


def per_loop_model(model: LoopLM) -> PerLoopModel:
    """Copy every sublayer once per loop, so that each loop gets separate gradients.

    The copies share storage with the model: a step of its optimizer also changes them.
    """
    loops = [[_with_new_leaves(s) for s in model.sublayers] for _ in range(model.config.loops)]
    columns = [(s, [loop[j] for loop in loops]) for j, s in enumerate(model.sublayers)]
    return PerLoopModel(
        loops,
        [ParamGroup(_shared(s), [_shared(v) for v in copies]) for s, copies in columns],
        [ParamGroup(_gains(s), [_gains(v) for v in copies]) for s, copies in columns],
    )


def _with_new_leaves(sublayer: Sublayer) -> Sublayer:
    """Copy a sublayer so that its shared parameters are new leaves on the same storage.

    All other parameters and buffers stay the same objects.
    """
    memo: dict[int, object] = {id(t): t for t in (*sublayer.parameters(), *sublayer.buffers())}
    for p in (*_shared(sublayer), *_gains(sublayer)):
        memo[id(p)] = nn.Parameter(p.detach())
    return copy.deepcopy(sublayer, memo)


def _shared(sublayer: Sublayer) -> list[nn.Parameter]:
    """List the branch's parameters that all loops share: all but the routers of single loops."""
    branch = sublayer.branch
    routers = branch.routers if isinstance(branch, MoE) and len(branch.routers) > 1 else ()
    excluded = {id(router) for router in routers}
    return [p for p in branch.parameters() if id(p) not in excluded]


def _gains(sublayer: Sublayer) -> list[nn.Parameter]:
    """List the gains of the norms before and after the branch."""
    norms = (sublayer.norm_in, sublayer.norm_out)
    return [norm.weight for norm in norms if norm is not None]


def run_per_loop(
    model: LoopLM, sublayers: list[list[Sublayer]], tokens: Tensor, on_visit: OnVisit | None = None
) -> tuple[LoopState, Tensor]:
    """Run all loops, each over its copies of the sublayers; the same bits as `LoopLM.forward`.

    The gain of the norm before a loop's first sublayer belongs to that loop, though the kernel
    that applies it runs at the end of the loop before.

    Args:
        model: the model.
        sublayers: for each loop, its 2K sublayers (`per_loop_model`).
        tokens: int64 [B, T].
        on_visit: called with each visit and the stream after it.

    Returns:
        The state after the last loop, and the final normalised states [B, T, d_model].
    """
    s = model.run(tokens, range(len(sublayers)), by_loop=sublayers, on_visit=on_visit)
    return s, model.output(s, tokens, on_visit=on_visit)


def gradients(
    output: Tensor,
    groups: Sequence[ParamGroup],
    others: Sequence[nn.Parameter] = (),
    weight: Tensor | None = None,
) -> tuple[list[list[list[Tensor]]], list[Tensor]]:
    """Return gradients of <output, weight> by [group][loop][parameter], and those of `others`.

    The autograd graph is retained for further calls.
    """
    leaves = [p for group in groups for params in group.by_loop for p in params]
    grads = iter(torch.autograd.grad(output, [*leaves, *others], weight, retain_graph=True))
    by_group = [[[next(grads) for _ in params] for params in group.by_loop] for group in groups]
    return by_group, list(grads)


def gram(by_loop: list[list[Tensor]]) -> Tensor:
    """Return the inner products of the loops' tensors, float64 [R, R] on the CPU."""
    total = torch.zeros(len(by_loop), len(by_loop), dtype=torch.float64)
    for tensors in zip(*by_loop, strict=True):
        flat = torch.stack([t.flatten() for t in tensors]).double()
        total += (flat @ flat.T).cpu()
    return total


def norms(grams: Tensor) -> Tensor:
    """Return the norm of each visit: [..., R, R] -> [..., R]."""
    return grams.diagonal(dim1=-2, dim2=-1).sqrt()


def norm_of_sum(grams: Tensor) -> Tensor:
    """Return the norm of the sum over visits: [..., R, R] -> [...]."""
    return grams.sum((-2, -1)).clamp_min(0).sqrt()


def cosines(grams: Tensor) -> Tensor:
    """Return the cosines between visits: [..., R, R]; 0 where a visit has no gradient."""
    n = norms(grams)
    return grams / (n[..., :, None] * n[..., None, :]).clamp_min(1e-300)


def kappas(u: Tensor, g: Tensor) -> Tensor:
    """Return kappa_R of each sublayer, u, g [S, R, R] -> [S]; the paper's is their maximum."""
    bound = u.shape[-1] * norms(u).max() * norms(g).max()
    return norm_of_sum(u) * norm_of_sum(g) / bound.clamp_min(1e-300)


def directional_kappas(u: Tensor, g: Tensor) -> Tensor:
    """Return kappa_R of the visits' directions alone, [S]: each visit's norm replaces the bound.

    R (|sum U| / sum |U|) (|sum G| / sum |G|): never below `kappas`, at most R, and equal to R
    if all visits point in the same direction, whatever their norms.
    """
    scale = (norms(u).sum(-1) * norms(g).sum(-1)).clamp_min(1e-300)
    return u.shape[-1] * norm_of_sum(u) * norm_of_sum(g) / scale
