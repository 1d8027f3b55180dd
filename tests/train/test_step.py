"""One training step: a gradient that is not finite, and the experts' balance."""

import math

import pytest
import torch

from deeploop.config import Config, ModelConfig, MoEConfig, TrainConfig
from deeploop.model.looplm import LoopLM
from deeploop.model.moe.layer import MoE
from deeploop.train.optim import make_optimizer
from deeploop.train.setup import open_run
from deeploop.train.step import train_step
from deeploop.utils.errors import Diverged

PLANS = {
    "full": {},
    "segments": {"backprop": "segments", "backprop_loops": 2},
    "last": {"backprop": "last", "backprop_loops": 1},
}


def make(plan, experts=4):
    """A LOOM model of two layers and three loops, and two micro-batches of 2 x 16 tokens."""
    torch.manual_seed(0)
    model = LoopLM(
        ModelConfig(
            residual="loom", d_model=16, n_layers=2, loops=3, n_heads=2, seq_len=16,
            vocab_size=31, embed_std=0.25,
            moe=MoEConfig(experts=experts, top_k=2, d_expert=8, shared=1),
        )
    )  # fmt: skip
    config = Config(model=model.config, train=TrainConfig(batch_size=4, **PLANS[plan]))
    tokens = torch.randint(0, 31, (2, 2, 17))
    return model, config, [(t[:, :-1], t[:, 1:]) for t in tokens]


def step(model, config, batch, lr=1e-2):
    return train_step(model, make_optimizer(model, config.train), config, batch, lr)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("plan", PLANS)
def test_a_bad_gradient_beside_a_finite_loss_is_reported(plan, bad):
    """Also where only the first segment's is bad, and the last one's norm is finite."""
    model, config, batch = make(plan)
    left = [bad]
    model.embed_tokens.weight.register_hook(lambda g: g * left.pop() if left else g)
    metrics = step(model, config, batch)
    assert metrics.total_loss().isfinite() and metrics.nonfinite
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_good_step_reports_nothing():
    assert not step(*make("segments")).nonfinite


def test_a_run_with_a_bad_gradient_stops(config, quiet):
    trainer = open_run(config, quiet)
    trainer.model.embed_tokens.weight.register_hook(lambda g: g * math.nan)
    with pytest.raises(Diverged, match="gradient is not finite"):
        trainer.fit()


def count_choices(model, capacity):
    """Count the experts that each MoE's tokens choose, from its inputs, as it runs.

    Returns, for each MoE, int64 [loops, experts], filled by the model's forward; the second
    list counts at most `capacity` tokens of an expert and visit.
    """
    counted, within = [], []
    for moe in (s.branch for s in model.sublayers if isinstance(s.branch, MoE)):
        for totals in (counted, within):
            totals.append(torch.zeros(len(moe.routers), len(moe.bias), dtype=torch.int64))

        def count(moe, inputs, total=counted[-1], clipped=within[-1]):
            n, router = inputs
            loop = next(i for i, r in enumerate(moe.routers) if r is router)
            score = (n.detach().double() @ router.detach().double().T).sigmoid() + moe.bias
            chosen = score.topk(moe.top_k).indices.flatten().bincount(minlength=len(moe.bias))
            total[loop] += chosen
            clipped[loop] += chosen.clamp(max=capacity)

        moe.register_forward_pre_hook(count)
    return counted, within


@pytest.mark.parametrize("balance", ["centred", "released"])
@pytest.mark.parametrize("plan", PLANS)
def test_the_bias_moves_by_the_loads_of_its_own_layer(plan, balance):
    """By those within each visit's capacity, 12 slots, where LOOM's released code is followed."""
    model, config, batch = make(plan, experts=8)
    config = config.replace("model.moe", balance=balance)
    moes = [s.branch for s in model.sublayers if isinstance(s.branch, MoE)]
    for moe in moes:
        moe.bias.uniform_(-0.02, 0.02)
        for router in moe.routers:
            router.data.normal_(std=0.25)  # each loop its own
    before = [moe.bias.clone() for moe in moes]
    loads, within = count_choices(model, capacity=12)
    metrics = step(model, config, batch)
    assert torch.equal(metrics.loads, torch.stack(loads, 1))
    all_routed, kept = (
        [(x.double().sum(0).mean() - x.double().sum(0)).sign() for x in totals]
        for totals in (loads, within)
    )
    wanted = [
        config.model.moe.balance_lr * x for x in (kept if balance == "released" else all_routed)
    ]
    assert not torch.equal(*wanted)  # or layers could be exchanged unnoticed
    assert not all(map(torch.equal, all_routed, kept))
    for moe, old, move in zip(moes, before, wanted, strict=True):
        # A move of all experts together changes no choice.
        moved = moe.bias.double() - old
        torch.testing.assert_close(moved - moved.mean(), move - move.mean(), rtol=1e-4, atol=1e-8)
