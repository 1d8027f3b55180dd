"""Solvers of fixed points: a linear contraction with a known one, for each vector by itself."""

import pytest
import torch

from deeploop.model.depth.solvers import anderson, mixing_weights, plain, relative_residual

D = 12


def contraction(radius=0.9, dtype=torch.float64, seed=0):
    """f(x) = A x + b with a symmetric A of that spectral radius, and its fixed point [D]."""
    draw = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64, generator=draw))[0]
    eigenvalues = torch.linspace(-radius, radius, D, dtype=torch.float64)
    a, b = q @ torch.diag(eigenvalues) @ q.T, torch.randn(D, dtype=torch.float64, generator=draw)
    fixed = torch.linalg.solve(torch.eye(D, dtype=torch.float64) - a, b)
    a, b = a.to(dtype), b.to(dtype)
    return (lambda x: x @ a + b), fixed.to(dtype)


def starts(dtype=torch.float64):
    """Two sequences of three vectors, at distances of 1e-4 to 10 from nothing in particular."""
    x = torch.randn(2, 3, D, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return x * torch.tensor([1e-4, 1.0, 10.0], dtype=dtype)[:, None]


@pytest.mark.parametrize("solve", [plain, anderson])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_a_solver_reaches_the_fixed_point_of_a_contraction(solve, dtype, tolerance):
    f, fixed = contraction(dtype=dtype)
    found = solve(f, starts(dtype), 400, tolerance)
    assert found.state.dtype == dtype and (found.residual < tolerance).all()
    torch.testing.assert_close(
        found.state, fixed.expand(2, 3, D), rtol=30 * tolerance, atol=30 * tolerance
    )


def test_anderson_takes_fewer_evaluations():
    f, _ = contraction(0.97)
    slow, fast = plain(f, starts(), 999, 1e-8), anderson(f, starts(), 999, 1e-8, memory=6)
    assert (fast.residual < 1e-8).all() and (slow.residual < 1e-8).all()
    assert (fast.evaluations * 5 < slow.evaluations).all()


def test_anderson_solves_a_system_of_few_dimensions_at_once():
    """With more states than dimensions the least squares reach 0, up to the ridge."""
    a = torch.diag(torch.tensor([0.9, -0.8, 0.5], dtype=torch.float64))
    b = torch.ones(3, dtype=torch.float64)
    found = anderson(lambda x: x @ a + b, torch.zeros(1, 3, dtype=torch.float64), 7, 0.0, 6, 1e-12)
    assert found.residual.item() < 1e-9


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_anderson_does_not_depend_on_the_scale_of_the_states(scale):
    f, _ = contraction()
    x = starts()
    scaled = anderson(lambda x: f(x / scale) * scale, x * scale, 9)
    torch.testing.assert_close(scaled.state / scale, anderson(f, x, 9).state, rtol=1e-6, atol=1e-6)


def test_anderson_is_its_definition():
    """The bordered system [[0, 1'], [1, G G' + ridge I]] of the last m states, in full."""
    f, _ = contraction()
    xs, fs = [starts()[0, 1]], []
    for _ in range(7):
        fs.append(f(xs[-1]))
        x, y = torch.stack(xs[-3:]), torch.stack(fs[-3:])
        g, n = y - x, len(x)
        system = torch.zeros(n + 1, n + 1, dtype=torch.float64)
        system[0, 1:] = system[1:, 0] = 1
        system[1:, 1:] = g @ g.T + 0.01 * (g[-1] @ g[-1]) * torch.eye(n, dtype=torch.float64)
        right = torch.zeros(n + 1, dtype=torch.float64)
        right[0] = 1
        a = torch.linalg.solve(system, right)[1:]
        xs.append(a @ (x + 0.7 * g))
    seen = []

    def watched(x):
        seen.append(x[0])
        return f(x)

    anderson(watched, xs[0][None], 8, memory=3, beta=0.7)
    torch.testing.assert_close(torch.stack(seen), torch.stack(xs), rtol=1e-8, atol=1e-10)


def test_plain_without_a_tolerance_is_the_loop_to_the_bit():
    f, _ = contraction(dtype=torch.float32)
    x = starts(torch.float32)
    found = plain(f, x, 5)
    for _ in range(4):
        x = f(x)
    assert torch.equal(found.state, f(x)) and (found.evaluations == 5).all()
    assert torch.equal(found.residual, relative_residual(x, f(x)))


def test_anderson_returns_the_lowest_residual_and_the_first_if_it_is_not_finite():
    steps = iter([1.0, 0.1, 5.0, 3.0])  # |f(x) - x| of each evaluation
    found = anderson(lambda x: x + next(steps), torch.full((2, D), 10.0), 4)
    assert (found.residual < 0.011).all() and (found.evaluations == 4).all()
    bad = iter([float("nan"), 0.1, 0.1])
    found = anderson(lambda x: x + next(bad), torch.zeros(2, D), 3)
    assert found.state.isnan().all()


@pytest.mark.parametrize("solve", [plain, anderson])
def test_each_vector_has_its_own_end_and_stays_there(solve):
    """Its result is that of solving for it alone; f still sees it."""
    f, fixed = contraction(0.7)
    x = starts()
    x[0, 0] = fixed
    seen, states = [], []

    def watched(x):
        seen.append(x.clone())
        return f(x)

    found = solve(watched, x, 60, 1e-4, on_evaluation=lambda s: states.append(s))
    assert len(seen) == len(states) == found.evaluations.max() < 60
    assert found.evaluations[0, 0] == 1 < found.evaluations.min(-1).values[1]
    for place in [(0, 0), (0, 2), (1, 1)]:
        alone = solve(f, x[place][None], 60, 1e-4)
        torch.testing.assert_close(found.state[place], alone.state[0], rtol=1e-7, atol=1e-9)
        assert found.evaluations[place] == alone.evaluations
        for later in seen[found.evaluations[place] :]:
            assert torch.equal(later[place], found.state[place])
    whole = solve(watched, x, 60, 1e-4, to_the_end=True)
    assert len(seen) == 60 + len(states) and torch.equal(whole.state, found.state)
    assert torch.equal(whole.evaluations, found.evaluations)


@pytest.mark.parametrize("solve", [plain, anderson])
def test_a_budget_is_not_exceeded(solve):
    f, _ = contraction(0.99)
    calls = []
    found = solve(lambda x: calls.append(1) or f(x), starts(), 4, 1e-9)
    assert len(calls) == 4 and (found.residual >= 1e-9).all()
    nothing = solve(f, starts(), 0, 1e-9)
    assert torch.equal(nothing.state, starts()) and nothing.residual.isinf().all()


def test_weights_are_finite_and_sum_to_one_where_the_system_would_be_singular():
    """Equal residuals, some of them 0, of any size."""
    for dtype in (torch.float32, torch.float64):
        g = torch.randn(5, 1, D, dtype=dtype).expand(5, 4, D).clone()
        g[1, 3] = 0
        g[2] = 0
        g[3, :3] *= 1e9
        g[4, 3] *= 1e-9
        a = mixing_weights(g @ g.mT, 3, 1e-4)
        assert a.isfinite().all()
        torch.testing.assert_close(a.sum(-1), torch.ones(5, dtype=dtype))
        torch.testing.assert_close(a[2], torch.full((4,), 0.25, dtype=dtype))
        assert (a[1, 3] > 0.99) and (a[3, 3] > 0.99)
        assert (a.square().sum(-1) < 1 + 1e4).all()
    x = torch.ones(2, 3, D)
    assert torch.equal(anderson(lambda x: x, x, 9).state, x)


def test_bfloat16_states_are_mixed_in_float32():
    f, fixed = contraction(0.5)
    made = anderson(lambda x: f(x.double()).bfloat16(), starts().bfloat16(), 12)
    assert made.state.dtype == torch.bfloat16 and made.residual.dtype == torch.float32
    torch.testing.assert_close(
        made.state.double(), fixed.expand(2, 3, D), rtol=0.03, atol=0.03, check_dtype=False
    )
