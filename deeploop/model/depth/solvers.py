"""Find a state x with f(x) = x, for each vector of its last dimension by itself.

    plain      x <- f(x)
    anderson   x <- sum_i a_i (x_i + beta g_i),  g_i = f(x_i) - x_i, over the last m states x_i
               a minimises |sum_i a_i g_i|^2 + ridge |g_newest|^2 |a|^2,  sum_i a_i = 1

A vector's residual is |f(x) - x| / (1e-5 + |f(x)|). Once it is below the tolerance, the vector
stays as it is: f still sees it, as attention does a token that has come to rest. Residual, end
and weights a are those of each vector alone, not of a whole sequence as in DEQ's released code,
so that under a causal f no result depends on a later token.

With tolerance 0 nothing is tested, and the host never waits for the device; otherwise one bool
is read after each evaluation, to end once every vector is at rest.

Sources: Anderson (1965); Deep equilibrium models, arXiv 1909.01377, and their released code (beta
1, the residual, the lowest-residual iterate). Different here: the ridge is relative to the newest
residual, which bounds |a|^2 by 1 + 1/ridge at any scale, where a fixed number takes over once
residuals are small; and m is 3, ridge 1e-2 in the place of 6 and 1e-4, as a vector's old residuals
say less once the others, that f also depends on, have moved.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Solution(NamedTuple):
    """Where an iteration ended, for each vector."""

    state: Tensor  # [..., d] f(x) of the evaluation whose residual is given
    residual: Tensor  # [...] |f(x) - x| / (1e-5 + |f(x)|), float32 or wider
    evaluations: Tensor  # int64 [...] of f, until the vector came to rest


Function = Callable[[Tensor], Tensor]  # [..., d] -> [..., d]
OnEvaluation = Callable[[Solution], None]  # called with the solution after each evaluation


def plain(
    f: Function,
    x: Tensor,
    budget: int,
    tolerance: float = 0.0,
    to_the_end: bool = False,
    on_evaluation: OnEvaluation | None = None,
) -> Solution:
    """Apply f up to `budget` times; the state is that of the last evaluation.

    Args:
        f: [..., d] -> [..., d].
        x: [..., d] to start from.
        budget: most evaluations.
        tolerance: residual below which a vector stays as it is; 0: none does.
        to_the_end: evaluate `budget` times though every vector may be at rest.
        on_evaluation: called with the solution after each evaluation.
    """
    return _iterate(f, x, lambda x, y: y, False, budget, tolerance, to_the_end, on_evaluation)


def anderson(
    f: Function,
    x: Tensor,
    budget: int,
    tolerance: float = 0.0,
    memory: int = 3,
    ridge: float = 1e-2,
    beta: float = 1.0,
    to_the_end: bool = False,
    on_evaluation: OnEvaluation | None = None,
) -> Solution:
    """Mix the last states; the state is f(x) of the lowest residual.

    Args:
        f, x, budget, tolerance, to_the_end, on_evaluation: as for `plain`.
        memory: m, states that are mixed; 2 m states of x's size are kept.
        ridge: of the least squares, relative to the newest residual's square.
        beta: share of f(x_i) in what is mixed; the rest is x_i.
    """
    mix = AndersonMixing(memory, ridge, beta)
    return _iterate(f, x, mix, True, budget, tolerance, to_the_end, on_evaluation)


def relative_residual(x: Tensor, y: Tensor) -> Tensor:
    """Return |y - x| / (1e-5 + |y|) of each vector, without gradient: [..., d] -> [...]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, y = x.detach(), y.detach()
    change = torch.linalg.vector_norm(y - x, dim=-1, dtype=dtype)
    return change / (1e-5 + torch.linalg.vector_norm(y, dim=-1, dtype=dtype))


def _iterate(
    f: Function,
    x: Tensor,
    mix: Callable[[Tensor, Tensor], Tensor],
    lowest: bool,
    budget: int,
    tolerance: float,
    to_the_end: bool,
    on_evaluation: OnEvaluation | None,
) -> Solution:
    """Evaluate f, keep what is wanted, and mix x and f(x) to the next x."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    residual = torch.full(x.shape[:-1], torch.inf, dtype=dtype, device=x.device)
    best = Solution(x, residual, torch.zeros_like(residual, dtype=torch.int64))
    running: Tensor | None = None  # bool [...]; None: all
    for k in range(budget):
        y = f(x)
        residual = relative_residual(x, y)
        take = running
        if lowest and k:  # the first is taken even if it is not finite, so that this shows
            better = residual < best.residual
            take = better if running is None else better & running
        best = Solution(
            y if take is None else torch.where(take[..., None], y, best.state),
            residual if take is None else torch.where(take, residual, best.residual),
            best.evaluations + (1 if running is None else running),
        )
        if on_evaluation is not None:
            on_evaluation(best)
        if k + 1 == budget:
            break
        if tolerance:
            far = residual >= tolerance
            running = far if running is None else far & running
            if not to_the_end and not bool(running.any()):
                break
        x = mix(x, y)
        if running is not None:
            x = torch.where(running[..., None], x, best.state)
    return best


class AndersonMixing:
    """Mix the newest states by least squares: a step of `anderson`."""

    def __init__(self, memory: int = 3, ridge: float = 1e-2, beta: float = 1.0):
        self.memory, self.ridge, self.beta = memory, ridge, beta
        self.count = 0

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the next state: x and y = f(x), [..., d] -> [..., d]."""
        if not self.count:
            self._allocate(x)
        slot = self.count % self.memory
        self.count += 1
        n = min(self.count, self.memory)
        with torch.autocast(x.device.type, enabled=False):
            g = (y - x).to(self.gram.dtype)
            self.g[..., slot, :] = g
            self.mixed[..., slot, :] = torch.lerp(x, y, self.beta)
            products = (self.g[..., :n, :] @ g[..., None]).squeeze(-1)
            self.gram[..., slot, :n] = products
            self.gram[..., :n, slot] = products
            a = mixing_weights(self.gram[..., :n, :n], slot, self.ridge)
            return (a[..., None, :] @ self.mixed[..., :n, :]).squeeze(-2).to(x.dtype)

    def _allocate(self, x: Tensor) -> None:
        dtype, m = torch.promote_types(x.dtype, torch.float32), self.memory
        self.g, self.mixed = torch.empty(
            2, *x.shape[:-1], m, x.shape[-1], dtype=dtype, device=x.device
        )
        self.gram = torch.empty(*x.shape[:-1], m, m, dtype=dtype, device=x.device)


def mixing_weights(gram: Tensor, newest: int, ridge: float) -> Tensor:
    """Return a [..., n] of sum 1 that minimises a' gram a + ridge gram[newest, newest] |a|^2.

    Where that ridge is below the rounding of the largest entry, this takes its place, so that
    the system is never singular; where all entries are 0, every weight is 1/n.

    Args:
        gram: inner products of the residuals, [..., n, n], float32 or wider.
        newest: index of the newest.
        ridge: greater than 0.
    """
    limits = torch.finfo(gram.dtype)
    largest = gram.diagonal(dim1=-2, dim2=-1).amax(-1)
    scale = torch.maximum(ridge * gram[..., newest, newest], 16 * limits.eps * largest)
    n = gram.shape[-1]
    eye = torch.eye(n, dtype=gram.dtype, device=gram.device)
    # Bordered by a row of ones, the system has the solution A^-1 1 / (1' A^-1 1).
    system = gram / scale.clamp_min(limits.tiny)[..., None, None] + eye
    ones = gram.new_ones(*gram.shape[:-2], n, 1)
    y = torch.linalg.solve_ex(system, ones)[0].squeeze(-1)  # which, unlike solve, never waits
    return y / y.sum(-1, keepdim=True)
