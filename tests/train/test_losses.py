"""Losses at every loop and over exits: their definitions in float64, and their memory."""

import pytest
import torch
import torch.nn.functional as F

from deeploop.analyze.plan.memory import step_memory
from deeploop.config import Config, ModelConfig, TrainConfig
from deeploop.config.backprop import segments
from deeploop.data.batches import IGNORE
from deeploop.model.looplm import LoopLM
from deeploop.train.backprop import MicroBatch, run_segment
from deeploop.train.losses import loss_rule
from deeploop.train.losses.exits import log_geometric
from tests.helpers.plain_model import plain_loop, plain_readout, plain_start, scattered
from tests.model.test_borders import config_of, tokens

BATCH = 2


def make(loss, **train):
    """A float64 model like Ouro with exit gates, and a run of one batch of 2 x 8 tokens."""
    torch.manual_seed(0)
    model = scattered(
        LoopLM(config_of("peri_norm", loop_norm="each", depth="gate", seq_len=8, coda=0))
    )
    train = TrainConfig(**{"batch_size": BATCH, "precision": "fp32", "loss": loss} | train)
    y = tokens().roll(3, 1)
    y[0, -2:] = IGNORE
    return model, Config(model=model.config, train=train), tokens(), y


def per_loop(model, x, y, without_gradient=0):
    """Cross-entropies [R, B, T] (0 where ignored) and gate logits [R, B, T], from definitions."""
    losses, gates, (e, s) = [], [], plain_start(model, x)
    for loop in range(model.config.loops):
        s = plain_loop(model, s, e, loop)
        if loop < without_gradient:
            s = s._replace(h=s.h.detach())
        n = plain_readout(model, s)
        log_p = (n @ model.head.T).log_softmax(-1)
        loss = -log_p.gather(-1, y.clamp_min(0)[..., None])[..., 0]
        losses.append(loss.where(y != IGNORE, 0.0))
        gates.append(n @ model.depth.gate.weight[0] + model.depth.gate.bias)
    return torch.stack(losses), torch.stack(gates)


def exit_probabilities(gates):
    p, stay = [], torch.ones_like(gates[0])
    for g in gates[:-1]:
        p.append(stay * g.sigmoid())
        stay = stay * (1 - g.sigmoid())
    return torch.stack([*p, stay])


def definition(loss, losses, gates, keep):
    """The scalar of a loss, summed over the targets that `keep` marks."""
    p = exit_probabilities(gates)
    if loss == "each":
        return losses.mean(0)[keep].sum()
    expected = (p * losses).sum(0)
    if loss == "expected":
        return (expected + 0.05 * (p * p.log()).sum(0))[keep].sum()
    if loss == "ponder":
        prior = torch.tensor([0.2 * 0.8**t for t in range(len(p))], dtype=torch.float64)
        prior = (prior / prior.sum())[:, None, None]
        return (expected + 0.05 * (p * (p / prior).log()).sum(0))[keep].sum()
    gain = (losses[:-1] - losses[1:]).clamp_min(0).detach()
    wanted = torch.sigmoid(50 * (gain - 0.005))
    go_on = 1 - gates[:-1].sigmoid()
    bce = -(wanted * go_on.log() + (1 - wanted) * (1 - go_on).log())
    return bce.sum(0)[keep].sum() / len(p)


def assert_gradients(model, total, x):
    """The model's gradients are those of a plain sum over targets."""
    ours = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    (total / x.numel()).backward()
    for name, p in model.named_parameters():
        assert (ours[name] is None) == (p.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(ours[name], p.grad, rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.parametrize("loss", ["each", "expected", "ponder", "gate"])
def test_a_loss_and_its_gradients_are_its_definition(loss):
    model, config, x, y = make(loss)
    loss_rule(config.train).freeze_others(model)
    (segment,) = segments(config.train, 3)
    result = run_segment(model, config, segment, MicroBatch(x, y), chunk_rows=5)
    losses, gates = per_loop(model, x, y)
    assert_gradients(model, definition(loss, losses, gates, y != IGNORE), x)
    if loss == "gate":
        assert [n for n, p in model.named_parameters() if p.requires_grad] == [
            "depth.gate.weight", "depth.gate.bias",
        ]  # fmt: skip
    by_loop = losses.flatten(1).sum(1) / x.numel()
    torch.testing.assert_close(result.loss, by_loop[-1].detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(result.figures["loop_losses"], by_loop.detach(), rtol=1e-10, atol=0)


def test_figures_of_exits_are_means_over_the_batch():
    model, config, x, y = make("expected")
    (segment,) = segments(config.train, 3)
    figures = run_segment(model, config, segment, MicroBatch(x, y)).figures
    losses, gates = per_loop(model, x, y)
    p, keep = exit_probabilities(gates), y != IGNORE
    wanted = {
        "expected_loss": (p * losses).sum(0),
        "exit_entropy": -(p * p.log()).sum(0),
        "exit_loop": sum((t + 1) * p[t] for t in range(3)),
    }
    for name, values in wanted.items():
        mean = values[keep].sum().detach() / x.numel()
        torch.testing.assert_close(figures[name], mean, rtol=1e-9, atol=0)


def test_each_over_the_last_loops_is_their_mean_and_cuts_the_gradient_before():
    """arXiv 2311.12424: the mean over the last T outputs, earlier loops without gradient."""
    model, config, x, y = make("each", backprop="last", backprop_loops=2)
    (segment,) = segments(config.train, 3)
    run_segment(model, config, segment, MicroBatch(x, y))
    assert_gradients(model, per_loop(model, x, y, without_gradient=1)[0][1:].mean(0).sum(), x)


def test_progressive_adds_both_losses_with_their_weights():
    """(1 - a) after all loops and a after n + k, of which only k carry gradient."""
    model, config, x, y = make("last", backprop="progressive", progressive_weight=0.3)
    listed = segments(config.train, 3, step=next(
        step for step in range(99) if segments(config.train, 3, step)[0].no_grad_loops
    ))  # fmt: skip
    for segment in listed:
        run_segment(model, config, segment, MicroBatch(x, y))
    total, drawn = 0, listed[0]
    for weight, first, stop in ((0.3, drawn.loops.start, drawn.loops.stop), (0.7, 0, 3)):
        e, s = plain_start(model, x)
        for loop in range(stop):
            s = plain_loop(model, s, e, loop)
            if loop + 1 == first:
                s = s._replace(h=s.h.detach())
        log_p = (plain_readout(model, s) @ model.head.T).log_softmax(-1)
        total = total + weight * F.nll_loss(
            log_p.flatten(0, 1), y.flatten(), ignore_index=IGNORE, reduction="sum"
        )
    assert_gradients(model, total, x)


def test_a_truncated_geometric_prior_sums_to_one():
    p = log_geometric(0.2, 5).exp()
    assert p.sum() == pytest.approx(1)
    assert (p[1:] / p[:-1]).tolist() == pytest.approx([0.8] * 4)
    assert log_geometric(0.0, 4).exp().tolist() == pytest.approx([0.25] * 4)


def test_losses_at_every_loop_take_little_more_memory_than_one():
    """At most 1.15 times, at 8 loops and a vocabulary of 50k: no loop keeps its logits."""

    def peak(loss, depth):
        model = ModelConfig(
            residual="peri_norm", loop_norm="each", d_model=256, n_layers=4, loops=8, n_heads=4,
            vocab_size=50304, seq_len=512, depth=depth,
        )  # fmt: skip
        train = TrainConfig(batch_size=8, precision="bf16", loss=loss)
        return step_memory(Config(model=model, train=train)).at(8).peak

    assert 1 < peak("expected", "gate") / peak("last", "fixed") < 1.15
