"""Starts, injections, norms and signals of loops, for every residual rule."""

import dataclasses

import pytest
import torch

from deeploop.config import ModelConfig
from deeploop.model.looplm import LoopLM
from deeploop.model.noise import sequence_keys, truncated_normal
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError
from tests.helpers.plain_model import EPS, ROPE_BASE, check_gradients, plain_forward, scattered

RULES = ["pre_norm", "post_norm", "peri_norm", "deeploop", "loom"]
BORDERS = {  # a pairwise choice: each value of a field meets most values of the others
    "add": {"inject": "add"},
    "convex, norm": {"inject": "convex", "loop_norm": "each"},
    "Huginn": {
        "start": "noise", "inject": "adapter", "loop_norm": "last", "prelude": 1, "coda": 1,
        "readout_map": True,
    },
    "Parcae": {
        "start": "noise", "inject": "contractive", "loop_signal": "add", "prelude": 1,
        "input_norm": True, "readout_map": True,
    },
    "adapter, modulated": {
        "inject": "adapter", "loop_signal": "modulate", "coda": 1, "input_norm": True,
    },
    "Ouro": {"loop_norm": "each"},
    "modulated": {"loop_signal": "modulate"},
    "noise": {"start": "noise", "inject": "convex", "loop_signal": "modulate"},
}  # fmt: skip


def config_of(residual="pre_norm", **fields):
    m = ModelConfig(
        residual=residual, d_model=16, n_heads=2, n_layers=2, vocab_size=31, norm_eps=EPS,
        rope_base=ROPE_BASE, d_ff=24, **{"loops": 3, "seq_len": 16} | fields,
    )  # fmt: skip
    if residual != "loom" or m.inject == "none":
        return m
    return dataclasses.replace(m, loom=dataclasses.replace(m.loom, injection=False))


def tokens(batch=2, length=8):
    return torch.randint(0, 31, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("residual", RULES)
@pytest.mark.parametrize("borders", BORDERS)
def test_the_model_is_its_definition(residual, borders):
    torch.manual_seed(0)
    model = scattered(LoopLM(config_of(residual, **BORDERS[borders])))
    check_gradients(model, tokens(), rtol=1e-8, atol=1e-10)
    for loops in (1, 5):
        made, wanted = model(tokens(), loops=loops), plain_forward(model, tokens(), loops)
        torch.testing.assert_close(made, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("borders", BORDERS)
def test_cache_on_equals_cache_off(borders):
    model = scattered(LoopLM(config_of(**BORDERS[borders])))
    cache = model.new_cache(batch=2, max_len=8)
    parts = [model(x, cache=cache) for x in tokens().split([3, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens()), rtol=1e-9, atol=1e-9)


def test_experts_are_modulated_as_dense_branches_are():
    moe = dataclasses.replace(ModelConfig().moe, experts=4, top_k=2, d_expert=8, capacity_factor=0)
    for shared in (0, 1):
        m = config_of("loom", loop_signal="modulate", moe=dataclasses.replace(moe, shared=shared))
        check_gradients(scattered(LoopLM(m)), tokens(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("residual", RULES)
def test_modulation_changes_nothing_at_initialisation(residual):
    """It is zeroed after every other initialisation (LoopFormer's released code zeroes first)."""
    torch.manual_seed(0)
    plain = LoopLM(config_of(residual))
    torch.manual_seed(0)
    modulated = LoopLM(config_of(residual, loop_signal="modulate"))
    modulated.load_state_dict(plain.state_dict(), strict=False)
    assert torch.equal(plain(tokens()), modulated(tokens()))


def test_an_adapter_starts_as_the_identity_on_the_state():
    torch.manual_seed(0)
    plain = LoopLM(config_of())
    adapted = LoopLM(config_of(inject="adapter"))
    adapted.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(adapted(tokens()), plain(tokens()))


def test_an_adapter_that_reads_the_input_alone_forgets_the_loops_before():
    model = LoopLM(config_of(inject="adapter"))
    with torch.no_grad():
        model.borders.injection.linear.weight.copy_(torch.eye(16).repeat(1, 2).tril(16).triu(16))
    torch.testing.assert_close(model(tokens(), loops=1), model(tokens(), loops=4))


def test_contractive_injection_contracts_and_starts_as_parcaes():
    injection = LoopLM(config_of(inject="contractive")).borders.injection
    torch.testing.assert_close(injection.decay(), torch.full((16,), 0.2**0.5))
    for size in (-30.0, 0.0, 30.0):
        torch.nn.init.constant_(injection.log_rate, size)
        assert (injection.decay() <= 1).all() and (injection.decay() >= 0).all()


def test_a_readout_map_starts_as_the_identity():
    torch.manual_seed(0)
    plain = LoopLM(config_of(coda=1))
    mapped = LoopLM(config_of(coda=1, readout_map=True))
    mapped.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(mapped(tokens()), plain(tokens()), rtol=1e-6, atol=1e-6)


def test_the_largest_decay_is_logged(config, quiet):
    trainer = open_run(config.replace("model", inject="contractive"), quiet)
    trainer.model.borders.injection.log_rate.data[3] = -2.0
    wanted = trainer.model.borders.injection.decay().max().item()
    figures = trainer.step(observe=True).figures()
    trainer.lock.close()
    assert figures["largest_decay"] == pytest.approx(wanted) and 0.8 < wanted < 1


def test_noise_is_a_truncated_normal_of_its_place_alone():
    keys = sequence_keys(seed=3, step=5, rows=range(4))
    whole = truncated_normal(keys, range(64), 256, std=0.5)
    assert whole.abs().max() < 3 * 0.5 and whole.mean().abs() < 0.01
    assert whole.std().item() == pytest.approx(0.5 * 0.98658, rel=0.01)  # of the cut normal
    parts = [truncated_normal(keys[2:3], r, 256, 0.5) for r in (range(10), range(10, 64))]
    assert torch.equal(torch.cat(parts, 1), whole[2:3])
    assert torch.equal(sequence_keys(3, 5, range(2, 4)), keys[2:])
    every = torch.cat([sequence_keys(seed, step, range(64)) for seed in (0, 1) for step in (0, 1)])
    assert len(every.unique()) == 256
    flat = whole.reshape(4, -1)
    assert torch.corrcoef(flat).fill_diagonal_(0).abs().max() < 0.05
    assert not truncated_normal(keys, range(3), 8, std=0.0).any()


def test_noise_follows_the_seed_step_and_sequence(config, quiet):
    config = config.replace("model", start="noise", inject="adapter", prelude=1, coda=1)
    seen = []
    for micro in (0, 1):
        out = f"{config.train.out}-{micro}"
        trainer = open_run(config.replace("train", micro_batch=micro, out=out), quiet)
        trainer.step()
        seen.append({n: p.detach().clone() for n, p in trainer.model.named_parameters()})
        trainer.lock.close()
    for name, weight in seen[0].items():
        torch.testing.assert_close(seen[1][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"start": "noise"}, r"model\.start=noise: needs model\.inject"),
        ({"residual": "loom", "inject": "add"}, r"model\.inject=add: the rule loom injects"),
    ],
)
def test_borders_that_exclude_each_other_are_refused(fields, words):
    with pytest.raises(InputError, match=words):
        LoopLM(ModelConfig(vocab_size=31, **fields))
