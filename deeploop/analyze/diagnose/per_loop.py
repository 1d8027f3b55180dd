"""How much the visits of a shared weight pull together: their gradients apart, and kappa_R.

For visit r (one of R loops) of sublayer j, whose branch has the parameters phi_j:

    G_rj = d loss / d phi_j   through visit r alone    loss: as trained, nats per token
    U_rj = d F / d phi_j      through visit r alone    F: final normalised states [B, T, d_model]

Over r they add up to the ordinary gradient and the ordinary Jacobian, and a step along
-sum_r G_rj moves F, to first order, by at most sum_j |sum_r U_rj| |sum_r G_rj| a unit of
learning rate. DeepLoop (arXiv 2607.13491) bounds each visit by |U_rj| <= C_U beta/alpha and
|G_rj| <= C_G beta/alpha, and calls what sharing makes of it

    kappa_R = max_j |sum_r U_rj| |sum_r G_rj| / (R C_U C_G (beta/alpha)^2)     from 0 to R

It is 1 where visits of equal norm are orthogonal, and R where they are alike; where it grows
as R^gamma the smallest stable exponent is p = (1 + gamma)/4. The paper measures none of this.
Our reading, where it leaves the terms open:

    U     the Jacobian as above. |U| is its Frobenius norm over sqrt(numel F), estimated
          without bias by probes v ~ N(0, 1/numel F): E |v^T U|^2 = |U|_F^2 / numel F. The
          operator norm of a worst-case bound is another number.
    C_U   C_U beta/alpha is the largest |U_rj| of all visits, C_G beta/alpha the largest
          |G_rj|: the smallest constants for which the bound holds, and kappa_R <= R with it.
    phi_j the branch's parameters that all loops share. Norm gains are no part of f_j, and
          a router that one loop alone has is not shared.

All figures follow from inner products of the visits' gradients: Gram matrices [R, R].
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from deeploop.model.attention import AttentionContext
from deeploop.model.looplm import LoopLM
from deeploop.model.moe.layer import MoE
from deeploop.model.recompute import Watch
from deeploop.model.visits import LoopState, Sublayer, open_loop, update, walk


class Part(NamedTuple):
    """Some parameters of a sublayer that all loops share, and each loop's views of them."""

    own: list[nn.Parameter]
    visits: list[list[nn.Parameter]]  # by loop; leaves of their own, in the same storages


class Apart(NamedTuple):
    """A model's sublayers, once for each loop, in the model's own memory."""

    loops: list[list[Sublayer]]  # [R][2K]
    branches: list[Part]  # [2K]
    gains: list[Part]  # [2K]


def apart(model: LoopLM) -> Apart:
    """Sublayers whose visits have gradients apart; what steps the model's weights steps theirs."""
    loops = [[_view(s) for s in model.sublayers] for _ in range(model.config.loops)]
    columns = [(s, [loop[j] for loop in loops]) for j, s in enumerate(model.sublayers)]
    return Apart(
        loops,
        [Part(_shared(s), [_shared(v) for v in visits]) for s, visits in columns],
        [Part(_gains(s), [_gains(v) for v in visits]) for s, visits in columns],
    )


def _view(sublayer: Sublayer) -> Sublayer:
    """The sublayer over: shared parameters are new leaves in the old storages, the rest is it."""
    memo: dict[int, object] = {id(t): t for t in (*sublayer.parameters(), *sublayer.buffers())}
    for p in (*_shared(sublayer), *_gains(sublayer)):
        memo[id(p)] = nn.Parameter(p.detach())
    return copy.deepcopy(sublayer, memo)


def _shared(sublayer: Sublayer) -> list[nn.Parameter]:
    branch = sublayer.branch
    routers = branch.routers if isinstance(branch, MoE) and len(branch.routers) > 1 else ()
    apart = {id(router) for router in routers}
    return [p for p in branch.parameters() if id(p) not in apart]


def _gains(sublayer: Sublayer) -> list[nn.Parameter]:
    return [g for g in (sublayer.gain_in, sublayer.gain_out) if g is not None]


def run_apart(
    model: LoopLM, loops: list[list[Sublayer]], tokens: Tensor, watch: Watch | None = None
) -> LoopState:
    """`LoopLM.run` through all loops, each over sublayers of its own; the same bits.

    The gain in front of a loop's first sublayer is that loop's, though it acts at the end
    of the loop before.
    """
    c, x = model.config, model.embed(tokens)
    place = AttentionContext(*model.rope(tokens, None, x.dtype), slot=0)
    s = LoopState(x)
    for loop, sublayers in enumerate(loops):
        last = loop + 1 == len(loops)
        behind = model.gain_final if last else loops[loop + 1][0].gain_in
        s = open_loop(c, s, x, loop, sublayers[0].gain_in, x.dtype)
        for visit in walk(c, sublayers, loop, last, behind):
            if visit.sublayer_index + 1 == len(sublayers):
                visit = visit._replace(gain_next=behind)
            assert s.n is not None
            s = update(c, s, visit.branch(s.n, place), visit)
            if watch is not None:
                watch(visit, s.h)
    return s


def gradients(
    output: Tensor,
    parts: Sequence[Part],
    others: Sequence[nn.Parameter] = (),
    weight: Tensor | None = None,
) -> tuple[list[list[list[Tensor]]], list[Tensor]]:
    """Gradients of <output, weight> by [part][loop][parameter], and of others; keeps the graph."""
    leaves = [p for part in parts for visit in part.visits for p in visit]
    found = iter(torch.autograd.grad(output, [*leaves, *others], weight, retain_graph=True))
    by_part = [[[next(found) for _ in visit] for visit in part.visits] for part in parts]
    return by_part, list(found)


def gram(visits: list[list[Tensor]]) -> Tensor:
    """Inner products of what the visits hold, float64 [R, R] on the CPU; zeros for nothing."""
    total = torch.zeros(len(visits), len(visits), dtype=torch.float64)
    for tensors in zip(*visits, strict=True):
        rows = torch.stack([t.flatten() for t in tensors]).double()
        total += (rows @ rows.T).cpu()
    return total


def norms(grams: Tensor) -> Tensor:
    """Norm of each visit: [..., R, R] -> [..., R]."""
    return grams.diagonal(dim1=-2, dim2=-1).sqrt()


def joint(grams: Tensor) -> Tensor:
    """Norm of the sum over visits: [..., R, R] -> [...]."""
    return grams.sum((-2, -1)).clamp_min(0).sqrt()


def cosines(grams: Tensor) -> Tensor:
    """Cosines between visits: [..., R, R]; 0 where a visit has no gradient."""
    n = norms(grams)
    return grams / (n[..., :, None] * n[..., None, :]).clamp_min(1e-300)


def kappas(u: Tensor, g: Tensor) -> Tensor:
    """The paper's kappa_R of each sublayer, whose maximum it is: u, g [S, R, R] -> [S]."""
    bound = u.shape[-1] * norms(u).max() * norms(g).max()
    return joint(u) * joint(g) / bound.clamp_min(1e-300)


def directional(u: Tensor, g: Tensor) -> Tensor:
    """kappa_R with each visit's own norm in the bound's place, [S]: of directions alone.

    R (|sum U| / sum |U|) (|sum G| / sum |G|): never below `kappas`, at most R, and R where
    the visits point the same way, however much larger some are than others.
    """
    spread = (norms(u).sum(-1) * norms(g).sum(-1)).clamp_min(1e-300)
    return u.shape[-1] * joint(u) * joint(g) / spread
