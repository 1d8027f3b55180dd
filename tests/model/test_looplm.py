"""The walk against models written out plainly, and what every residual must hold."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from deeploop.config import ModelConfig
from deeploop.config.presets import preset, presets
from deeploop.model.attention import Attention, AttentionContext
from deeploop.model.looplm import LoopLM, count_parameters
from deeploop.model.state import LoopState, visits
from deeploop.utils.errors import InputError
from tests.helpers.plain_model import EPS, ROPE_BASE, plain_attention, plain_swiglu, rms_norm

RESIDUALS = ["pre_norm", "deepnorm", "deeploop"]


def small(**changes) -> ModelConfig:
    base = ModelConfig(
        d_model=24,
        n_layers=2,
        loops=3,
        n_heads=2,
        vocab_size=31,
        seq_len=16,
        norm_eps=EPS,
        rope_base=ROPE_BASE,
    )
    return dataclasses.replace(base, **changes)


def build(config: ModelConfig, scatter_gains: bool = True) -> LoopLM:
    """A float64 model whose gains are not all 1, so that a misplaced gain shows."""
    torch.manual_seed(0)
    model = LoopLM(config).double()
    if scatter_gains:
        for name, p in model.named_parameters():
            if "norm" in name:
                p.data.uniform_(0.5, 1.5)
    return model


def tokens(batch=2, length=16, vocab=31):
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1))


def plain_branch(branch, x, qk_norm=False):
    if isinstance(branch, Attention):
        return plain_attention(branch, x, qk_norm)
    return plain_swiglu(branch, x)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_one_loop_of_the_baseline_is_an_ordinary_pre_norm_gpt(qk_norm):
    config = small(residual="pre_norm", loops=1, n_layers=3, qk_norm=qk_norm)
    model, x = build(config), tokens()
    h = rms_norm(model.embed_tokens.weight[x], model.norm_embed.weight)
    for sublayer in model.sublayers:
        h = h + plain_branch(sublayer.branch, rms_norm(h, sublayer.gain_in), qk_norm)
    logits = rms_norm(h, model.final_gain) @ model.embed_tokens.weight.T
    torch.testing.assert_close(model.logits(model(x)), logits, rtol=1e-6, atol=1e-7)
    single = model.float()
    torch.testing.assert_close(single.logits(single(x)), logits.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("residual", ["deepnorm", "deeploop"])
def test_the_sandwich_arms_follow_the_papers_equation(residual):
    """x' = RMS_out(alpha x + f(RMS_in(x))), the same weights in every loop (Eq. 3.1)."""
    config = small(residual=residual)
    model, x = build(config), tokens()
    alpha = (2 * 2 * 3) ** (0.25 if residual == "deepnorm" else 0.5)
    h = rms_norm(model.embed_tokens.weight[x], model.norm_embed.weight)
    for _ in range(3):
        for sublayer in model.sublayers:
            f = plain_branch(sublayer.branch, rms_norm(h, sublayer.gain_in))
            h = rms_norm(alpha * h + f, sublayer.gain_out)
    logits = rms_norm(h, model.final_gain) @ model.embed_tokens.weight.T
    torch.testing.assert_close(model.logits(model(x)), logits, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_loops_share_one_set_of_storages(residual):
    counts = {
        count_parameters(LoopLM(small(residual=residual, loops=loops))) for loops in (1, 3, 16)
    }
    assert len(counts) == 1
    model = LoopLM(small(residual=residual))
    assert counts == {sum(p.numel() for p in model.parameters())}
    assert model.logits(model(tokens())).shape[-1] == 31  # tied: no head among them


def test_parameters_of_one_storage_count_once():
    weight = torch.zeros(3, 4)
    tied = torch.nn.ParameterList([torch.nn.Parameter(weight), torch.nn.Parameter(weight.T)])
    assert count_parameters(tied) == 12


@pytest.mark.parametrize("residual", RESIDUALS)
def test_shared_weights_get_the_sum_of_their_visits_gradients(residual):
    """Looping equals an unrolled model of K*R untied copies; gradients add up over copies."""
    config = small(residual=residual)
    looped, x = build(config), tokens()
    # N = K*R is 6 in both, so alpha is too.
    unrolled = build(dataclasses.replace(config, loops=1, n_layers=6))
    unrolled.embed_tokens.load_state_dict(looped.embed_tokens.state_dict())
    unrolled.norm_embed.load_state_dict(looped.norm_embed.state_dict())
    unrolled.norm_final.load_state_dict(looped.norm_final.state_dict())
    for i, sublayer in enumerate(unrolled.sublayers):
        sublayer.load_state_dict(looped.sublayers[i % 4].state_dict())
    assert looped.config.alpha == unrolled.config.alpha
    for model in (looped, unrolled):
        model.logits(model(x)).square().sum().backward()
    for j, sublayer in enumerate(looped.sublayers):
        copies = [unrolled.sublayers[j + 4 * r] for r in range(3)]
        for name, p in sublayer.named_parameters():
            total = sum(copy.get_parameter(name).grad for copy in copies)
            torch.testing.assert_close(p.grad, total, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [n for n in presets() if n.startswith("gpt2")])
def test_preset_sizes_are_the_papers(name):
    with torch.device("meta"):
        model = LoopLM(presets()[name].model)
    d, k, ff = (768, 12, 2048) if "small" in name else (1024, 24, 2752)
    gains = 2 + 2 * k * (1 if "baseline" in name else 2)
    size = sum(p.numel() for p in model.parameters())
    assert size == 50304 * d + k * (4 * d * d + 3 * d * ff) + gains * d
    assert size == pytest.approx(123.6e6 if "small" in name else 353.5e6, rel=0.005)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_beta_scales_v_o_and_ffn_but_not_q_and_k(residual):
    config = small(residual=residual, d_model=128, n_heads=2, embed_std=0.05)
    model = LoopLM(config)
    d, ff = 128, config.ff_width

    def gain(matrix, fan_in, fan_out):
        return matrix.std().item() / math.sqrt(2 / (fan_in + fan_out))

    for sublayer in model.sublayers:
        branch = sublayer.branch
        if isinstance(branch, Attention):
            q, k, v = branch.qkv.weight.split(d)
            assert gain(q, d, d) == pytest.approx(1, rel=0.05)
            assert gain(k, d, d) == pytest.approx(1, rel=0.05)
            assert gain(v, d, d) == pytest.approx(config.beta, rel=0.05)
            assert gain(branch.out.weight, d, d) == pytest.approx(config.beta, rel=0.05)
        else:
            gate, up = branch.gate_up.weight.split(ff)
            for matrix in (gate, up, branch.out.weight.T):
                assert gain(matrix, d, ff) == pytest.approx(config.beta, rel=0.05)
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert all((p == 1).all() for n, p in model.named_parameters() if "norm" in n)
    assert (config.beta == 1) == (residual == "pre_norm")


def test_other_loop_counts_keep_the_training_alpha():
    """The first loops of a longer run are those of training, so alpha is too."""
    model, x = build(small()), tokens()
    trained, longer = [], []
    model(x, on_visit=lambda visit, h: trained.append(h))
    model(x, loops=7, on_visit=lambda visit, h: longer.append(h))
    assert len(trained) == 3 * 4 and len(longer) == 7 * 4
    assert all(torch.equal(a, b) for a, b in zip(trained, longer, strict=False))
    with pytest.raises(InputError, match="loops=0"):
        model(x, loops=0)


def test_free_exponent():
    config = small(p=0.35)
    assert config.alpha == pytest.approx(12**0.35) and config.beta == pytest.approx(48**-0.35)


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("cuts", [[16], [1] * 16, [5, 1, 1, 4, 5], [1, 15]])
def test_cache_on_equals_cache_off(residual, cuts):
    model, x = build(small(residual=residual)), tokens()
    whole = model(x)
    cache = model.new_cache(batch=2, max_len=16)
    parts = [model(part, cache=cache) for part in x.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    assert cache.length == 16


def test_cache_slots_are_one_a_loop_and_layer():
    cache = build(small()).new_cache(batch=2, max_len=16, loops=5)
    assert cache.kv.shape == (2, 5 * 2, 2, 2, 16, 12)


def test_a_sequence_longer_than_the_tables_is_refused():
    model = build(small())
    with pytest.raises(InputError, match="17 positions"):
        model(tokens(length=17))


def test_a_model_without_a_vocabulary_is_refused():
    with pytest.raises(InputError, match=r"model\.vocab_size=0: "):
        LoopLM(small(vocab_size=0))


@pytest.mark.parametrize("residual", RESIDUALS)
def test_no_token_sees_its_future(residual):
    model, x = build(small(residual=residual)), tokens()
    changed = x.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 31
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("length", [1, 2, 16])
def test_bf16_autocast_stays_near_float32(residual, length):
    model, x = build(small(residual=residual)).float(), tokens(length=length)
    exact = model.logits(model(x))
    with torch.autocast("cpu", torch.bfloat16):
        n = model(x)
        low = model.logits(n).float()
    assert n.dtype == torch.bfloat16
    assert F.mse_loss(low, exact) / exact.square().mean() < 1e-3


def test_a_bfloat16_stream_would_lose_the_initial_updates():
    """At 12 blocks x 7 loops f is below half an ulp of alpha h, for 99% of values and more."""
    paper = preset("gpt2-small-r7-deeploop").model
    config = dataclasses.replace(paper, n_layers=1, loops=84, vocab_size=64)  # as many visits
    assert config.alpha == paper.alpha == pytest.approx(12.96, abs=0.01)
    torch.manual_seed(0)
    model, x = LoopLM(config), tokens(length=64, vocab=64)
    walked = list(visits(model.sublayers, 0, 0, model.final_gain))
    start = LoopState(model.embed(x))
    s = model.rule.start_loop(start, start.h, walked[0])
    context = AttentionContext(*model.rope(x, None, s.n.dtype))
    for visit in walked:
        f = visit.branch(s.n, context)
        stream = (config.alpha * s.h).bfloat16()
        assert ((stream + f).bfloat16() == stream).float().mean() > 0.99
        s = model.rule(s, f, visit)


def test_the_stream_stays_float32_under_autocast():
    seen = []
    model = build(small()).float()
    with torch.autocast("cpu", torch.bfloat16):
        n = model(tokens(), on_visit=lambda visit, h: seen.append(h.dtype))
        assert model.embed(tokens()).dtype == torch.float32
    assert set(seen) == {torch.float32} and n.dtype == torch.bfloat16


def test_loop_counts_do_not_recompile():
    model, x = build(small()).float(), tokens()
    torch._dynamo.reset()
    counter = CompileCounter()
    for sublayer in model.sublayers:
        sublayer.branch.forward = torch.compile(sublayer.branch.forward, backend=counter)
    model(x, loops=1)
    once = counter.frame_count
    for loops in (2, 3, 5):
        model(x, loops=loops)
    assert counter.frame_count == once
