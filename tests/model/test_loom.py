"""LOOM against a plain float64 model, its constants, its switches and what each must hold."""

import math

import pytest
import torch
import torch.nn.functional as F

from deeploop.config import scaling
from deeploop.config.presets import LOOM_ABLATIONS, preset
from deeploop.kernels import looping_update_two
from deeploop.kernels import two_memory_coefficients as by_two
from deeploop.model.attention import Attention
from deeploop.model.looplm import LoopLM
from deeploop.utils.errors import InputError
from tests.helpers.loom_cases import build, plain_loom, plain_moe, small
from tests.helpers.plain_model import plain_attention, plain_swiglu, rms_norm


def tokens(batch=2, length=16, vocab=31):
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("n_layers", "loops", "gamma"),
    [(10, 1, 0.15811), (10, 3, 0.05270), (10, 5, 0.03162), (10, 6, 0.02635), (10, 9, 0.01757),
     (10, 12, 0.01318), (15, 9, 0.01434), (15, 12, 0.01076)],
)  # fmt: skip
def test_gamma_of_the_paper(n_layers, loops, gamma):
    assert scaling.loom_gamma(n_layers, loops) == pytest.approx(gamma, abs=5e-6)
    config = small(n_layers=n_layers, loops=loops)
    assert config.gamma == scaling.loom_gamma(n_layers, loops)


def test_injection_weights_of_the_paper():
    for n_layers, second, third in ((10, 0.0791, 0.0527), (15, 0.0645, 0.0430)):
        config = small(n_layers=n_layers, loops=12)
        assert config.injection(0) == 0
        assert config.injection(1) == pytest.approx(second, abs=6e-5)
        assert config.injection(2) == pytest.approx(third, abs=6e-5)
    assert scaling.injection_weight(2, 1, lam=9.0) == 1  # clamped
    assert small(loom={"injection": False}).injection(3) == 0


@pytest.mark.parametrize("carry", ["raw", "normalised"])
@pytest.mark.parametrize("source", ["output", "readout"])
def test_forward_and_gradients_are_the_plain_models(source, carry):
    """Two layers, three loops: the paper's reading, the released code's, and their mixtures."""
    model = build(small(loom={"global_source": source, "carry": carry}))
    x = tokens()
    n, wanted = model(x), plain_loom(model, x, source, carry)
    torch.testing.assert_close(n, wanted, rtol=1e-10, atol=1e-12)
    direction = torch.randn(n.shape, dtype=n.dtype, generator=torch.Generator().manual_seed(2))
    parameters = dict(model.named_parameters())
    del parameters["untied.weight"]  # behind n
    ours = torch.autograd.grad((n * direction).sum(), list(parameters.values()))
    plain = torch.autograd.grad((wanted * direction).sum(), list(parameters.values()))
    for name, a, b in zip(parameters, ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_the_first_layer_adds_its_output_twice():
    """In loop 1 both memories hold o alone, so h' = h + 2 o."""
    model, x, seen = build(small()), tokens(), []
    with torch.no_grad():
        plain_loom(model, x, seen=seen)
        ours = []
        model(x, watch=lambda visit, h: ours.append(h))
        start = model.embed(x)
    h, o = seen[0]
    torch.testing.assert_close(h, start + 2 * o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[0], start + 2 * o, rtol=1e-12, atol=1e-12)


def test_the_closed_form_is_the_two_memory_form(monkeypatch):
    """Six loops over three layers: one memory written a layer, or two; the same to 1e-12."""
    model, x = build(small(n_layers=3, loops=6)), tokens()
    closed = model(x)
    from deeploop.model import visits

    def two(config, s, f, visit):
        layer = visit.sublayer_index // 2 + 1
        where = (visit.loop + 1, layer, config.n_layers, config.loom.decay)
        read_local, read_global = by_two(*where)
        h, local, glob, n = looping_update_two(
            s.h, f, s.local, s.glob, None, scale=config.gamma, decay=config.loom.decay,
            read_local=read_local, read_global=read_global, source="output", eps=config.norm_eps,
            memory_dtype=torch.float64,
        )  # fmt: skip
        return s._replace(h=h, n=n, local=local, glob=glob)

    monkeypatch.setattr(visits, "_remember", two)
    monkeypatch.setattr(visits, "_memory", lambda config, s: s.glob)
    torch.testing.assert_close(model(x), closed, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("residual", LOOM_ABLATIONS)
def test_arms_of_the_ablation_are_plain_models_too(residual):
    parts, per_loop = LOOM_ABLATIONS[residual]
    model = build(small(loom=parts, moe={"router_per_loop": per_loop}))
    c, x = model.config, tokens()
    on = {"scaling": True, "injection": True, "branch_norm": True, "looping_residual": True} | parts
    gamma = 0.5 / (3 * math.sqrt(2)) if on["scaling"] else 1.0
    e = model.embedding.weight[x] / c.embed_std
    h, total, weight = e, 0.0, 0.0
    for t in range(1, 4):
        if t > 1 and on["injection"]:
            g = 0.5 / (t * math.sqrt(2))
            h = (1 - g) * h + g * e
        local, local_weight = 0.0, 0.0
        for layer in range(2):
            attention, experts = model.sublayers[2 * layer : 2 * layer + 2]
            o = gamma * plain_attention(attention.branch, rms_norm(h))
            if on["looping_residual"]:
                local, local_weight = 0.5 * local + o, 0.5 * local_weight + 1
                total, weight = 0.5 * total + o, 0.5 * weight + 1
                h = h + local / local_weight + total / weight
            else:
                h = h + o
            routers = experts.branch.routers
            assert len(routers) == (3 if per_loop else 1)
            f = plain_moe(experts.branch, rms_norm(h), routers[t - 1 if per_loop else 0])
            if on["branch_norm"]:
                f = rms_norm(f) * experts.gain_out
            else:
                assert experts.gain_out is None
            h = h + gamma * f
    torch.testing.assert_close(model(x), rms_norm(h), rtol=1e-10, atol=1e-12)


def test_without_experts_the_branch_is_a_swiglu():
    model, x = build(small(moe={"experts": 0}, loops=1, n_layers=1)), tokens()
    h = model.embed(x)
    attention, dense = model.sublayers
    gamma = model.config.gamma
    h = h + 2 * gamma * plain_attention(attention.branch, rms_norm(h))
    f = plain_swiglu(dense.branch, rms_norm(h))
    h = h + gamma * rms_norm(f) * dense.gain_out
    torch.testing.assert_close(model(x), rms_norm(h), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("residual", ["pre_norm", "deepnorm", "deeploop"])
def test_experts_work_under_the_other_arms(residual):
    model = build(small(residual=residual, loops=2, n_layers=1))
    c, x = model.config, tokens()
    h = rms_norm(model.embedding.weight[x], model.gain_embedding)
    for t in range(2):
        attention, experts = model.sublayers
        for sublayer in (attention, experts):
            n = rms_norm(h, sublayer.gain_in)
            if isinstance(sublayer.branch, Attention):
                f = plain_attention(sublayer.branch, n)
            else:
                f = plain_moe(sublayer.branch, n, sublayer.branch.routers[t])
            h = h + f if residual == "pre_norm" else rms_norm(c.alpha * h + f, sublayer.gain_out)
    torch.testing.assert_close(model(x), rms_norm(h, model.gain_final), rtol=1e-8, atol=1e-9)


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
    model(x, watch=lambda visit, h: trained.append(h))
    model(x, loops=5, watch=lambda visit, h: longer.append(h))
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
    assert model.head is not model.embedding.weight and model.head.shape == (2048, 128)


def test_bf16_autocast_stays_near_float32():
    """Few tokens change experts, and the stream stays float32."""
    model, x, seen = build(small()).float(), tokens(), []
    exact = model.logits(model(x))
    with torch.autocast("cpu", torch.bfloat16):
        n = model(x, watch=lambda visit, h: seen.append(h.dtype))
        low = model.logits(n).float()
    assert n.dtype == torch.bfloat16 and set(seen) == {torch.float32}
    assert F.mse_loss(low, exact) / exact.square().mean() < 5e-3
