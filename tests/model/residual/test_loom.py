"""LOOM against a plain float64 model, its constants, its switches and what each must hold."""

import pytest
import torch
import torch.nn.functional as F

from deeploop.config import scaling
from deeploop.config.presets import LOOM_ABLATIONS, preset
from deeploop.model.looplm import LoopLM
from deeploop.model.residual import residual_rule
from deeploop.utils.errors import InputError
from tests.helpers.loom_cases import build, small
from tests.helpers.plain_model import (
    check_gradients,
    plain_attention,
    plain_forward,
    plain_moe,
    plain_swiglu,
    rms_norm,
)


def tokens(batch=2, length=16, vocab=31):
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("n_layers", "loops", "gamma"),
    [(10, 1, 0.15811), (10, 3, 0.05270), (10, 5, 0.03162), (10, 6, 0.02635), (10, 9, 0.01757),
     (10, 12, 0.01318), (15, 9, 0.01434), (15, 12, 0.01076)],
)  # fmt: skip
def test_gamma_of_the_paper(n_layers, loops, gamma):
    assert scaling.loom_gamma(n_layers, loops) == pytest.approx(gamma, abs=5e-6)
    rule = residual_rule(small(n_layers=n_layers, loops=loops))
    assert rule.gamma == scaling.loom_gamma(n_layers, loops)


def test_injection_weights_of_the_paper():
    for n_layers, second, third in ((10, 0.0791, 0.0527), (15, 0.0645, 0.0430)):
        rule = residual_rule(small(n_layers=n_layers, loops=12))
        assert rule.injection(0) == 0
        assert rule.injection(1) == pytest.approx(second, abs=6e-5)
        assert rule.injection(2) == pytest.approx(third, abs=6e-5)
    assert scaling.injection_weight(2, 1, lam=9.0) == 1  # clamped
    assert residual_rule(small(loom={"injection": False})).injection(3) == 0


@pytest.mark.parametrize("carry", ["raw", "normalised"])
@pytest.mark.parametrize("source", ["output", "readout"])
def test_forward_and_gradients_are_the_plain_models(source, carry):
    """Two layers, three loops: the paper's reading, the released code's, and their mixtures."""
    model = build(small(loom={"global_source": source, "carry": carry}))
    check_gradients(model, tokens(), rtol=1e-8, atol=1e-10)


def test_the_first_layer_adds_its_output_twice():
    """In loop 1 both memories hold o alone, so h' = h + 2 o."""
    model, x, seen = build(small()), tokens(), []
    model(x, on_visit=lambda visit, h: seen.append(h))
    start = model.embed(x)
    o = model.rule.gamma * plain_attention(model.sublayers[0].branch, rms_norm(start))
    torch.testing.assert_close(seen[0], start + 2 * o, rtol=1e-12, atol=1e-12)


def test_the_closed_form_is_the_two_memory_form():
    """Six loops over three layers: one memory written a layer, or two; the same to 1e-12."""
    model, x = build(small(n_layers=3, loops=6)), tokens()
    torch.testing.assert_close(model(x), plain_forward(model, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ablation", LOOM_ABLATIONS)
def test_ablations_are_plain_models_too(ablation):
    fields, per_loop = LOOM_ABLATIONS[ablation]
    model = build(small(loom=fields, moe={"router_per_loop": per_loop}))
    experts = model.sublayers[1]
    assert len(experts.branch.routers) == (3 if per_loop else 1)
    assert (experts.gain_out is None) == (not fields.get("branch_norm", True))
    x = tokens()
    torch.testing.assert_close(model(x), plain_forward(model, x), rtol=1e-10, atol=1e-12)


def test_switches_leave_their_term_out():
    """One layer, two loops, every switch off: h + f, then h + f; and each switch alone."""
    off = {"scaling": False, "injection": False, "branch_norm": False, "looping_residual": False}
    x = tokens()
    for switch in (None, *off):
        model = build(small(loom=off | ({switch: True} if switch else {}), n_layers=1, loops=2))
        gamma = 0.5 / 2 if switch == "scaling" else 1.0
        e = h = model.embed(x)
        outputs = []
        for t in range(2):
            if switch == "injection" and t:
                h = 0.75 * h + 0.25 * e
            attention, experts = model.sublayers
            outputs.append(plain_attention(attention.branch, rms_norm(h)))
            if switch == "looping_residual":
                mean = (outputs[-1] + 0.5 * outputs[0]) / 1.5 if t else outputs[0]
                h = h + outputs[-1] + mean
            else:
                h = h + gamma * outputs[-1]
            f = plain_moe(experts.branch, rms_norm(h), experts.branch.routers[t])
            h = h + gamma * (rms_norm(f, experts.gain_out) if switch == "branch_norm" else f)
        torch.testing.assert_close(model(x), rms_norm(h), rtol=1e-10, atol=1e-12)


def test_without_experts_the_branch_is_a_swiglu():
    model, x = build(small(moe={"experts": 0}, loops=1, n_layers=1)), tokens()
    h = model.embed(x)
    attention, dense = model.sublayers
    gamma = model.rule.gamma
    h = h + 2 * gamma * plain_attention(attention.branch, rms_norm(h))
    f = plain_swiglu(dense.branch, rms_norm(h))
    h = h + gamma * rms_norm(f) * dense.gain_out
    torch.testing.assert_close(model(x), rms_norm(h), rtol=1e-10, atol=1e-12)


def test_routers_begin_as_copies_of_the_first():
    torch.manual_seed(0)
    model = LoopLM(small(loops=5))
    for sublayer in model.sublayers[1::2]:
        routers = sublayer.branch.routers
        assert len(routers) == 5 and len({r.data_ptr() for r in routers}) == 5
        assert all(torch.equal(r, routers[0]) for r in routers) and routers[0].std() > 0.1
    first, second = (s.branch.routers[0] for s in model.sublayers[1::2])
    assert not torch.equal(first, second)


def test_more_loops_than_trained_keep_gamma_and_the_last_router():
    model, x = build(small()), tokens()
    trained, longer = [], []
    model(x, on_visit=lambda visit, h: trained.append(h))
    model(x, loops=5, on_visit=lambda visit, h: longer.append(h))
    assert len(longer) == 5 * 4
    assert all(torch.equal(a, b) for a, b in zip(trained, longer, strict=False))
    moe = model.sublayers[1].branch
    assert moe.router(4) is moe.routers[2]


@pytest.mark.parametrize("reading", ["paper", "released"])
@pytest.mark.parametrize("cuts", [[16], [1] * 16, [5, 1, 1, 4, 5]])
def test_cache_on_equals_cache_off(reading, cuts):
    loom = {} if reading == "paper" else {"global_source": "readout", "carry": "normalised"}
    model, x = build(small(loom=loom, moe={"capacity_factor": 1.0})).eval(), tokens()
    whole = model(x)
    cache = model.new_cache(batch=2, max_len=16)
    parts = [model(part, cache=cache) for part in x.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)


def test_a_cache_that_does_not_fit_is_refused():
    model, x = build(small()).eval(), tokens()
    with pytest.raises(InputError, match=r"loops=5: the cache has 6 slots"):
        model(x, loops=5, cache=model.new_cache(2, 16))
    with pytest.raises(InputError, match="1 sequences, but the cache is for 2"):
        model(x[:1], cache=model.new_cache(2, 16))
    cache = model.new_cache(2, 16)
    model(x[:, :4], loops=2, cache=cache)
    with pytest.raises(InputError, match="filled by 2 loops"):
        model(x[:, 4:], loops=3, cache=cache)


def test_no_token_sees_its_future():
    model, x = build(small()).eval(), tokens()
    changed = x.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 31
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=1e-12, atol=1e-12)
    assert (before[:, 10:] != after[:, 10:]).any()


def test_capacity_acts_in_training_alone():
    model, x = build(small(moe={"capacity_factor": 0.5})), tokens()
    dropping, whole = model.train()(x), model.eval()(x)
    assert not torch.equal(dropping, whole)
    free = build(small(moe={"capacity_factor": 0.0}))
    torch.testing.assert_close(free(x), whole, rtol=1e-12, atol=1e-12)


def test_the_embedding_has_unit_variance_and_a_head_of_its_own():
    torch.manual_seed(0)
    model = LoopLM(preset("loom-tiny").model.__class__(**{
        **vars(preset("loom-tiny").model), "vocab_size": 2048,
    }))  # fmt: skip
    x = model.embed(torch.arange(2048)[None])
    assert x.std().item() == pytest.approx(1, rel=0.01)
    assert model.head is not model.embed_tokens.weight and model.head.shape == (2048, 128)


def test_bf16_autocast_stays_near_float32():
    """Few tokens change experts, and the stream stays float32."""
    model, x, seen = build(small()).float(), tokens(), []
    exact = model.logits(model(x))
    with torch.autocast("cpu", torch.bfloat16):
        n = model(x, on_visit=lambda visit, h: seen.append(h.dtype))
        low = model.logits(n).float()
    assert n.dtype == torch.bfloat16 and set(seen) == {torch.float32}
    assert F.mse_loss(low, exact) / exact.square().mean() < 5e-3
