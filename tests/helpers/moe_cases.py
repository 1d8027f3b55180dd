"""The router and the combine written out token by token in float64, and their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deeploop.kernels import expert_combine, reference

EPS = 1e-3


# ---------------------------------------------------------------------------
# Router


def router_inputs(
    tokens: int, d: int, experts: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.randn(tokens, d).to(dtype)
    return x, torch.randn(experts, d, dtype=wide) / d**0.5, 0.3 * torch.randn(experts, dtype=wide)


def dense_router(x: Tensor, w: Tensor, bias: Tensor | None, top_k: int) -> tuple[Any, ...]:
    """Weights, indices, load and z, one token at a time."""
    weights, indices, squares = [], [], [x.sum() * 0.0 + w.sum() * 0.0]
    for token in x:
        logits = w @ token
        score = 1 / (1 + torch.exp(-logits))
        steered = (score.detach() + (0 if bias is None else bias)).tolist()
        ranking = sorted(range(len(steered)), key=lambda e: (-steered[e], e))[:top_k]
        chosen = torch.stack([score[e] for e in ranking])
        weights.append(chosen / chosen.sum())
        indices.append(ranking)
        squares.append(torch.log(torch.exp(logits - logits.max()).sum()) + logits.max())
    load = torch.zeros(w.shape[0], dtype=torch.int64)
    for ranking in indices:
        for e in ranking:
            load[e] += 1
    z = sum(s * s for s in squares) / max(1, len(x))
    empty = torch.zeros(0, top_k, dtype=x.dtype)
    return torch.stack(weights) if weights else empty, torch.tensor(indices), load, z


def run_router(
    fn: Any,
    inputs: Sequence[Tensor | None],
    top_k: int,
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool] = (True, True),
) -> list[Any]:
    """weights, indices, load, z, dx, dw."""
    x, w, bias = inputs
    leaves = [t.detach().requires_grad_(n) for t, n in zip((x, w), needs, strict=True)]
    weights, indices, load, z = fn(*leaves, bias, top_k)
    used = [
        (y, g)
        for y, g in zip((weights, z), gradients, strict=True)
        if g is not None and y.requires_grad
    ]
    torch.autograd.backward([y for y, _ in used], [g for _, g in used])
    return [weights.detach(), indices, load, z.detach(), *(t.grad for t in leaves)]


def compare_router(
    fn: Any,
    inputs: Sequence[Tensor | None],
    top_k: int,
    gradients: Sequence[Tensor | None] | None = None,
    needs: Sequence[bool] = (True, True),
    dx_tolerance: float = 0.0,
    **tolerance: float,
) -> None:
    """A router against the dense one: choice and load exactly, the rest closely."""
    x, w, _ = inputs
    if gradients is None:
        gradients = [torch.randn(len(x), top_k, dtype=w.dtype), torch.tensor(0.3, dtype=w.dtype)]
    double = [[None if t is None else t.double() for t in ts] for ts in (inputs, gradients)]
    actual = run_router(fn, inputs, top_k, gradients, needs)
    expected = run_router(dense_router, double[0], top_k, double[1], needs)
    assert actual[1].dtype == torch.int32 and actual[2].dtype == torch.int64
    assert actual[1].tolist() == expected[1].tolist()
    assert actual[2].tolist() == expected[2].tolist()
    assert actual[2].sum() == len(x) * top_k
    assert [t.dtype for t in (actual[0], actual[3])] == [w.dtype] * 2
    for name, i, like in (("weights", 0, w), ("z", 3, w), ("dx", 4, x), ("dw", 5, w)):
        if expected[i] is None:
            assert actual[i] is None, f"{name}: expected no gradient"
            continue
        assert actual[i].dtype == like.dtype, name
        close = (
            {"rtol": dx_tolerance, "atol": dx_tolerance} if i == 4 and dx_tolerance else tolerance
        )
        torch.testing.assert_close(
            actual[i].double(), expected[i], **close, msg=lambda text, name=name: f"{name}: {text}"
        )


# Logits of four experts, three of them chosen: scores down to e^-200, e^-1e30 and up to 1.
TINY_SCORES = [
    (-25.0, -25.0, -25.0, -25.0), (-200.0, -201.0, -200.5, -203.0), (200.0, 200.0, 200.0, 200.0),
    (-1e30, -1e30, -1e30, -1e30), (-25.0, -200.0, 200.0, -24.0), (-30.0, -31.0, -95.0, -600.0),
]  # fmt: skip


def check_tiny_scores(router: Any, logits: Sequence[float]) -> None:
    """Compare a router in float32 on given logits with a softmax over log scores in float64."""
    exact = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    x = torch.ones(1, 1, requires_grad=True)
    w = torch.tensor(logits)[:, None].requires_grad_()
    weights, indices, _, _ = router(x, w, None, 3)
    torch.testing.assert_close(weights.sum(), torch.ones(()))
    log_scores = torch.nn.functional.logsigmoid(exact).gather(1, indices.long())
    expected = log_scores.softmax(-1)
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-7)
    pull = torch.tensor([[1.0, -2.0, 0.5]])
    weights.backward(pull)
    expected.backward(pull.double())
    dw = exact.grad[0]  # w is the logits, as x is 1
    torch.testing.assert_close(w.grad[:, 0].double(), dw, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------
# Combine


NAMES = ("h", "routed", "slots", "weights", "shared", "w_branch", "w_next")
FLOATS = (0, 1, 3, 4, 5, 6)


def combine_inputs(
    tokens: int,
    d: int,
    k: int,
    dtype: torch.dtype = torch.float32,
    spare: int = 3,
    drop: float = 0.2,
) -> list[Tensor | None]:
    """Slots in random order, some dropped, NaN in every row that no slot names."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    slots = torch.randperm(tokens * k).view(tokens, k)
    slots = torch.where(torch.rand(tokens, k) < drop, -1, slots).int()
    routed = torch.full((tokens * k + spare, d), float("nan"), dtype=dtype)
    named = slots[slots >= 0].long()
    routed[named] = torch.randn(len(named), d).to(dtype)
    weights = torch.rand(tokens, k, dtype=wide)
    h, shared = (torch.randn(tokens, d).to(dtype) for _ in range(2))
    gains = [torch.rand(d).add(0.5).to(wide) for _ in range(2)]
    return [h, routed, slots, weights, shared, *gains]


def dense_combine(h, routed, slots, weights, shared, w_branch, w_next, scale, eps, norm=True):
    """h' and n, one token and slot at a time; dropped slots are stepped over."""

    def normed(v, w):
        v = v / (v.square().mean() + eps).sqrt()
        return v if w is None else v * w

    rows_h, rows_n = [h[:0]], [h[:0]]
    for t in range(slots.shape[0]):
        y = torch.zeros(h.shape[-1], dtype=h.dtype) if shared is None else shared[t]
        for j, slot in enumerate(slots[t].tolist()):
            if slot >= 0:
                y = y + weights[t, j] * routed[slot]
        row = h[t] + scale * normed(y, w_branch)
        rows_h.append(row[None])
        rows_n.append(normed(row, w_next)[None])
    return torch.cat(rows_h), torch.cat(rows_n) if norm else None


def run_combine(
    fn: Any,
    inputs: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    needs: Sequence[bool] = (True,) * 6,
    scale: float = 0.7,
    norm: bool = True,
    eps: float = EPS,
) -> list[Tensor | None]:
    """h', n and the gradients of everything that is a float."""
    leaves = list(inputs)
    for i, need in zip(FLOATS, needs, strict=True):
        x = leaves[i]
        leaves[i] = None if x is None else x.detach().requires_grad_(need)
    outputs = fn(*leaves, scale, eps, norm)
    used = [
        (y, g)
        for y, g in zip(outputs, gradients, strict=True)
        if y is not None and g is not None and y.requires_grad
    ]
    torch.autograd.backward([y for y, _ in used], [g for _, g in used])
    gradients_of = [None if leaves[i] is None else leaves[i].grad for i in FLOATS]
    return [*(None if y is None else y.detach() for y in outputs), *gradients_of]


def compare_combine(
    fn: Any,
    inputs: Sequence[Tensor | None],
    used: tuple[int, int] = (1, 1),
    needs: Sequence[bool] = (True,) * 6,
    norm: bool = True,
    eps: float = EPS,
    **tolerance: float,
) -> None:
    """A combine against the dense one: values, gradients, zeros in rows without a slot."""
    h, routed = inputs[0], inputs[1]
    grads = [torch.randn(h.shape).to(t.dtype) for t in (h, routed)]
    grads = [g if u else None for g, u in zip(grads, used, strict=True)]
    double = [t.double() if t is not None and t.is_floating_point() else t for t in inputs]
    grads64 = [None if g is None else g.double() for g in grads]
    actual = run_combine(fn, inputs, grads, needs, norm=norm, eps=eps)
    expected = run_combine(dense_combine, double, grads64, needs, norm=norm, eps=eps)
    like = [h, routed, *(inputs[i] for i in FLOATS)]
    names = ["h'", "n", *(f"d{NAMES[i]}" for i in FLOATS)]
    for name, a, e, x in zip(names, actual, expected, like, strict=True):
        if e is None:
            # The dense one knows what a missing output does not reach; zero says the same.
            assert a is None or not a.any(), f"{name}: expected no gradient"
            continue
        assert a is not None and a.dtype == x.dtype, name
        torch.testing.assert_close(
            a.double(), e, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
    if actual[3] is not None:
        bare = torch.ones(len(routed), dtype=torch.bool)
        bare[inputs[2][inputs[2] >= 0].long()] = False
        assert not actual[3][bare].any()


def compare_combine_overflow(d: int) -> None:
    """Compare the combine on values near 1e19, whose mean square overflows, with eager float32."""
    inputs = combine_inputs(3, d, 2)
    for i in (0, 1, 4):
        inputs[i] = 1e19 * (1 + inputs[i].clamp(-0.5, 0.5))
    gradients = [torch.randn(3, d), torch.randn(3, d)]
    actual = run_combine(expert_combine, inputs, gradients)
    eager = run_combine(reference.expert_combine, inputs, gradients)
    for a, e in zip(actual, eager, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
