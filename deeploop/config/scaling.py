"""Compute the residual scales of looped Transformers from numbers of blocks and loops.

Symbols: K physical blocks (attention + FFN each), R loops, N = K*R unrolled
blocks, M = 2N sublayer visits. `alpha` multiplies the residual at run time;
`beta` is a gain on the initial weights of V, O and the FFN matrices and is
never applied at run time.

LOOM scales by other numbers: gamma multiplies every branch, g_t weighs the embedding that
is injected again at the start of loop t; there M = n_layers and H = loops.

Sources: DeepLoop, arXiv 2607.13491 (sections 3-4); DeepNet, arXiv 2203.00555; LOOM,
arXiv 2610.01153, whose gamma is the rule of arXiv 2606.18524 with lambda = 1/2.
"""

import math

DEEPNORM_EXPONENT = 0.25
DEEPLOOP_EXPONENT = 0.5


def alpha(n_blocks: float, p: float = DEEPLOOP_EXPONENT) -> float:
    """Return the run-time residual scale (2N)^p of N unrolled blocks."""
    return float((2 * n_blocks) ** p)


def beta(n_blocks: float, p: float = DEEPLOOP_EXPONENT) -> float:
    """Return the initialisation gain (8N)^-p of N unrolled blocks."""
    return float((8 * n_blocks) ** -p)


def untied_budget(n_blocks: float, p: float) -> float:
    """Return M (beta/alpha)^2, the update bound when visits' gradients do not align.

    1/2 for DeepNorm at every N; 1/(8N) for DeepLoop.
    """
    return 2 * n_blocks * (beta(n_blocks, p) / alpha(n_blocks, p)) ** 2


def aligned_budget(n_layers: int, loops: int, p: float) -> float:
    """Return M R (beta/alpha)^2, the update bound when the R visits of a weight fully align.

    R/2 for DeepNorm, so it grows with the loops; 1/(8K) for DeepLoop.
    """
    return loops * untied_budget(n_layers * loops, p)


def threshold_exponent(gamma: float) -> float:
    """Return the smallest stable p = (1+gamma)/4 when the alignment kappa_R grows as R^gamma."""
    return (1 + gamma) / 4


def alignment_growth(kappa: float, loops: int) -> float:
    """Return gamma = log(kappa_R) / log(R), the growth of a measured kappa_R if it is R^gamma.

    One number of loops cannot tell a constant factor from growth; a fit over several can.
    """
    if loops < 2 or kappa <= 0:
        raise ValueError(f"kappa={kappa}, loops={loops}: needs kappa > 0 and loops >= 2")
    return math.log(kappa) / math.log(loops)


def hierarchical_blocks(k_high: int, k_low: int, low_cycles: int) -> float:
    """Return N_g = M_g/2 of HRM, with M_g = 2(K_H + C_L K_L) gradient-visible visits.

    12 for K_H = K_L = 4, C_L = 2, the paper's setting. The released HRM code
    lets only one low pass see the gradient: that is `low_cycles=1`, N_g = 8.
    """
    return float(k_high + low_cycles * k_low)


def loom_gamma(n_layers: int, loops: int, lam: float = 0.5) -> float:
    """Return gamma = lambda / (H sqrt(M)), LOOM's branch scale for H loops over M layers."""
    return lam / (loops * math.sqrt(n_layers))


def convex_weight(loop: int, n_layers: int, lam: float = 0.5) -> float:
    """Return g_t = lambda / (t sqrt(M)), at most 1, of loop t counted from 1."""
    return min(1.0, lam / (loop * math.sqrt(n_layers)))


def injection_weight(loop: int, n_layers: int, lam: float = 0.5) -> float:
    """Return g_t of h <- (1 - g_t) h + g_t x at the start of loop t, counted from 1.

    `convex_weight` from the second loop on; 0 in the first, which begins with h = x.
    """
    return convex_weight(loop, n_layers, lam) if loop > 1 else 0.0
