"""Gradients of single visits, against the model's gradient and finite differences."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deeploop.analyze.diagnose.per_loop import (
    cosines,
    directional_kappas,
    gradients,
    gram,
    kappas,
    per_loop_model,
    run_per_loop,
)
from deeploop.config import LoomConfig, ModelConfig, MoEConfig
from deeploop.model.looplm import LoopLM, count_parameters
from deeploop.model.loss import linear_cross_entropy

EXPERTS = MoEConfig(experts=4, top_k=2, d_expert=8, shared=1, capacity_factor=1.0)
RELEASED = LoomConfig(global_source="readout", carry="normalised")
BASE = ModelConfig(d_model=16, n_layers=2, loops=3, n_heads=2, vocab_size=31, seq_len=8)
MODELS = {
    "pre_norm": dataclasses.replace(BASE, residual="pre_norm"),
    "deepnorm": dataclasses.replace(BASE, residual="deepnorm", qk_norm=True),
    "deeploop": BASE,
    "deeploop, experts": dataclasses.replace(BASE, moe=EXPERTS),
    "one loop": dataclasses.replace(BASE, loops=1),
    "loom": dataclasses.replace(BASE, residual="loom", moe=EXPERTS),
    "loom, dense": dataclasses.replace(BASE, residual="loom"),
    "loom, released": dataclasses.replace(BASE, residual="loom", moe=EXPERTS, loom=RELEASED),
    "loom, one router": dataclasses.replace(
        BASE, residual="loom", moe=dataclasses.replace(EXPERTS, router_per_loop=False)
    ),
}


def build(config, dtype=torch.float64):
    """A model whose gains and routers all differ, and tokens."""
    torch.manual_seed(0)
    model = LoopLM(config).to(dtype)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.uniform_(0.5, 1.5)
        if "router" in name:
            p.data.normal_()
    return model, torch.randint(0, 31, (2, 8))


def loss_of(model, result, tokens):
    s, n = result
    loss = linear_cross_entropy(n, model.head, tokens) / tokens.numel()
    return loss if s.router_z is None else loss + 1e-3 * s.router_z


@pytest.mark.parametrize("name", MODELS)
def test_running_copies_per_loop_gives_the_models_bits(name):
    model, tokens = build(MODELS[name], torch.float32)
    seen, wanted = [], []
    copies = per_loop_model(model).sublayers
    _, n = run_per_loop(model, copies, tokens, lambda visit, h: seen.append(h))
    assert torch.equal(n, model(tokens, on_visit=lambda visit, h: wanted.append(h)))
    assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", MODELS)
def test_visits_add_up_to_the_ordinary_gradient(name, dtype, tolerance):
    model, tokens = build(MODELS[name], dtype)
    everything = range(model.config.loops)
    s = model.run(tokens, everything)
    loss_of(model, (s, model.output(s, tokens)), tokens).backward()
    copies = per_loop_model(model)
    groups = copies.branches + copies.gains
    shared = {id(p) for group in groups for p in group.params}
    others = [p for p in model.parameters() if id(p) not in shared]
    total = loss_of(model, run_per_loop(model, copies.sublayers, tokens), tokens)
    by_group, rest = gradients(total, groups, others)
    pairs = list(zip(others, rest, strict=True))
    for group, visits in zip(groups, by_group, strict=True):
        pairs += [
            (p, torch.stack(g).sum(0))
            for p, g in zip(group.params, zip(*visits, strict=True), strict=True)
        ]
    assert len(pairs) == len(list(model.parameters()))
    for p, grad in pairs:
        assert (grad - p.grad).norm() <= tolerance * p.grad.norm()


def test_copies_are_separate_leaves_on_the_models_storage():
    model, _ = build(MODELS["loom"])
    before = count_parameters(model)
    copies = per_loop_model(model)
    for group in copies.branches + copies.gains:
        for visit in group.by_loop:
            assert [p.data_ptr() for p in visit] == [p.data_ptr() for p in group.params]
        leaves = [id(p) for visit in group.by_loop for p in visit] + [id(p) for p in group.params]
        assert len(set(leaves)) == len(leaves)
    moe = copies.sublayers[2][1].branch
    assert moe.bias is model.sublayers[1].branch.bias  # one for all loops, the model's
    assert moe.routers[2] is model.sublayers[1].branch.routers[2]  # of one loop: not copied
    assert count_parameters(model) == before


@pytest.mark.parametrize(("name", "shared"), [("loom", 4), ("loom, one router", 5)])
def test_a_router_for_all_loops_is_shared_like_the_experts(name, shared):
    """gate_up and down of the routed and of the shared experts; the router where it is one."""
    model, _ = build(MODELS[name])
    assert [len(group.params) for group in per_loop_model(model).branches] == [2, shared] * 2


@pytest.mark.parametrize("name", ["deeploop", "pre_norm", "loom"])
def test_a_visits_gradient_is_the_slope_along_that_visit_alone(name):
    """Against central differences, with the weights of one visit moved and no other's."""
    model, tokens = build(MODELS[name])
    model.eval()
    copies = per_loop_model(model)
    groups = copies.branches + copies.gains
    by_group, _ = gradients(
        loss_of(model, run_per_loop(model, copies.sublayers, tokens), tokens), groups
    )
    for j, group in enumerate(groups):
        for loop, visit in enumerate(group.by_loop):
            for p, g in zip(visit, by_group[j][loop], strict=True):
                direction = torch.randn_like(p)
                ends = []
                for step in (1e-5, -1e-5):
                    with torch.no_grad():
                        shared, p.data = p.data, p.data + step * direction
                        ends.append(
                            loss_of(model, run_per_loop(model, copies.sublayers, tokens), tokens)
                        )
                        p.data = shared
                slope = (ends[0] - ends[1]) / 2e-5
                torch.testing.assert_close(slope, (g * direction).sum(), rtol=1e-4, atol=1e-8)


def grams_of(*sublayers):
    """Gram matrices of sublayers, each given as its visits' vectors."""
    return torch.stack([gram([[torch.tensor(v)] for v in visits]) for visits in sublayers])


def test_kappa_is_1_where_visits_are_orthogonal_and_r_where_they_are_alike():
    eye = torch.eye(4).tolist()
    same = [[0.0, 2.0, 0.0, 0.0]] * 4
    mixed = grams_of(eye, [[x / 2 for x in v] for v in same])
    for of in (kappas, directional_kappas):
        torch.testing.assert_close(of(mixed, mixed), torch.tensor([1.0, 4.0]).double())
        assert of(mixed[:1], grams_of(same)).item() == pytest.approx(2)  # sqrt(R) R / R


def test_kappa_takes_one_bound_for_all_visits_and_directional_each_visits_own():
    g = grams_of([[3.0], [1.0]], [[1.0], [1.0]])
    u = grams_of([[1.0], [1.0]], [[2.0], [2.0]])
    torch.testing.assert_close(kappas(u, g), torch.tensor([2 * 4 / 12, 4 * 2 / 12]).double())
    torch.testing.assert_close(directional_kappas(u, g), torch.tensor([2.0, 2.0]).double())


def test_visits_that_cancel_have_kappa_0():
    g = grams_of([[1.0, 0.0], [-1.0, 0.0]])
    assert kappas(g, g).item() == directional_kappas(g, g).item() == 0
    torch.testing.assert_close(cosines(g)[0], torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).double())


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 999))
def test_kappa_lies_between_0_and_r(loops, width, seed):
    draw = torch.Generator().manual_seed(seed)
    u, g = (grams_of(*torch.randn(3, loops, width, generator=draw).tolist()) for _ in range(2))
    low, high = kappas(u, g), directional_kappas(u, g)
    assert (low >= 0).all() and (low <= high + 1e-9).all() and (high <= loops + 1e-9).all()


def test_nothing_shared_is_zero_and_not_nan():
    nothing = gram([[], []])[None]
    for of in (kappas, directional_kappas):
        assert of(nothing, nothing).item() == 0
    assert (cosines(nothing) == 0).all()


def test_a_gram_matrix_spans_every_parameter_of_a_visit():
    visits = [[torch.ones(2), torch.full((2, 2), 3.0)], [torch.ones(2), torch.zeros(2, 2)]]
    assert gram(visits).tolist() == [[38.0, 2.0], [2.0, 2.0]]
    assert gram(visits[::-1]).tolist() == [[2.0, 2.0], [2.0, 38.0]]
