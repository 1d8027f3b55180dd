"""The papers' constants, as printed or derived from their formulas."""

import math

import pytest

from deeploop.config import scaling
from deeploop.config.presets import preset


@pytest.mark.parametrize(
    ("size", "loops", "alpha", "beta"),
    [
        ("small", 1, 4.899, 0.10206),
        ("small", 3, 8.485, 0.05893),
        ("small", 5, 10.954, 0.04564),
        ("small", 7, 12.961, 0.03858),
        ("medium", 1, 6.928, 0.07217),
        ("medium", 3, 12.0, 0.04167),
        ("medium", 5, 15.492, 0.03227),
        ("medium", 7, 18.330, 0.02728),
    ],
)
def test_deeploop_values_of_the_papers_models(size, loops, alpha, beta):
    model = preset(f"gpt2-{size}-r{loops}-deeploop").model
    assert model.alpha == pytest.approx(alpha, abs=5e-4)
    assert model.beta == pytest.approx(beta, abs=5e-6)


def test_deepnorm_values():
    assert scaling.alpha(36, scaling.DEEPNORM_EXPONENT) == pytest.approx(2.913, abs=5e-4)
    assert scaling.beta(36, scaling.DEEPNORM_EXPONENT) == pytest.approx(0.2427, abs=5e-5)


@pytest.mark.parametrize("n", [1, 12, 36, 168, 4096])
def test_update_bounds_without_alignment(n):
    assert scaling.untied_budget(n, 0.25) == pytest.approx(1 / 2)
    assert scaling.untied_budget(n, 0.5) == pytest.approx(1 / (8 * n))
    assert scaling.beta(n) / scaling.alpha(n) == pytest.approx(1 / (4 * n))


@pytest.mark.parametrize(("n_layers", "loops"), [(1, 1), (12, 7), (24, 3), (2, 16)])
def test_update_bounds_under_full_alignment(n_layers, loops):
    assert scaling.aligned_budget(n_layers, loops, 0.5) == pytest.approx(1 / (8 * n_layers))
    assert scaling.aligned_budget(n_layers, loops, 0.25) == pytest.approx(loops / 2)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_threshold_exponent_is_where_the_aligned_bound_stops_growing(gamma):
    """kappa_R = R^gamma makes the bound R^(gamma+1-4p), flat at the threshold p."""
    p = scaling.threshold_exponent(gamma)

    def bound(loops: int) -> float:
        return loops**gamma * scaling.untied_budget(12 * loops, p)

    assert bound(64) == pytest.approx(bound(2))
    assert p == pytest.approx((1 + gamma) / 4)


def test_growth_implied_by_a_measured_alignment():
    assert scaling.alignment_growth(8.0, 16) == pytest.approx(0.75)
    assert scaling.alignment_growth(16.0, 16) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="loops=1"):
        scaling.alignment_growth(1.0, 1)


def test_hierarchical_blocks():
    """M_g = 24, N_g = 12 in the paper's HRM; 16 and 8 by the released HRM code."""
    n = scaling.hierarchical_blocks(4, 4, 2)
    assert n == 12
    assert scaling.alpha(n) == pytest.approx(4.899, abs=5e-4)
    assert scaling.beta(n) == pytest.approx(0.10206, abs=5e-6)
    released = scaling.hierarchical_blocks(4, 4, 1)
    assert released == 8
    assert scaling.alpha(released) == pytest.approx(4.0)
    assert scaling.beta(released) == pytest.approx(0.125)
    assert scaling.hierarchical_blocks(2, 3, 5) == 2 + 5 * 3


def test_all_rules_are_finite_at_extreme_depth():
    assert math.isfinite(scaling.alpha(10**9)) and scaling.beta(10**9) > 0
