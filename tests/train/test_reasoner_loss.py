"""Stablemax, the loss of a segment, the Q head's target, when sequences end; a whole step."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from deeploop.config import ReasonerConfig, TrainConfig
from deeploop.model.reasoner import Reasoner
from deeploop.train.halting import halted, least_segments
from deeploop.train.losses.reasoner import continue_target, segment_loss, stablemax_cross_entropy
from deeploop.train.optim import clip_gradients, make_optimizer, step_if_finite
from deeploop.train.weight_average import WeightAverage
from tests.helpers.plain_reasoner import plain_stablemax, small


def test_stablemax_is_its_definition_and_float64():
    torch.manual_seed(0)
    logits = 20 * torch.randn(3, 4, 6, dtype=torch.float64)
    logits[0, 0, :3] = torch.tensor([0.0, 1.0, -1.0])
    logits.requires_grad_()
    targets = torch.randint(0, 6, (3, 4))
    targets[1, 2] = -100
    ours = stablemax_cross_entropy(logits, targets)
    assert ours[1, 2] == 0
    means = ours.sum(1) / (targets != -100).sum(1)
    wanted = plain_stablemax(logits, targets)
    torch.testing.assert_close(means, wanted, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad(x.sum(), logits)[0] for x in (means, wanted))
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)
    assert stablemax_cross_entropy(logits.detach().bfloat16(), targets).dtype == torch.float64


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e4, -1e4])
def test_stablemax_has_finite_gradients_everywhere(value):
    """s'(x) is 1 at 0, and the branch that is not taken adds no NaN."""
    logits = torch.full((1, 1, 3), value, requires_grad=True)
    loss = stablemax_cross_entropy(logits, torch.tensor([[0]])).sum()
    loss.backward()
    slope = 1 / (1 + abs(value))  # of log s
    wanted = torch.tensor([-2 / 3, 1 / 3, 1 / 3]) * slope
    torch.testing.assert_close(logits.grad[0, 0], wanted, rtol=1e-4, atol=0)
    assert loss.item() == pytest.approx(torch.tensor(3.0).log().item())


def test_a_segments_loss_is_of_sequences_over_the_whole_batch():
    """A sequence of one label weighs as much as one of three; exact needs all labels right."""
    logits = torch.full((2, 3, 2), 0.0)
    logits[0, :, 1] = 3.0  # predicts 1 everywhere, with probability 4/5
    logits[1, :, 1] = 3.0
    targets = torch.tensor([[1, 1, 0], [-100, 1, -100]])
    loss = segment_loss(logits, torch.zeros(2, 2), targets, batch_size=4)
    assert loss.right.tolist() == [2, 1] and loss.labels.tolist() == [3, 1]
    assert loss.exact.tolist() == [False, True]
    one, zero = (-torch.tensor([0.8, 0.2], dtype=torch.float64).log()).tolist()
    assert loss.cross_entropy.tolist() == pytest.approx([(2 * one + zero) / 3, one])
    half = 0.5 * torch.tensor(2.0).log().item()
    assert loss.total.item() == pytest.approx((sum(loss.cross_entropy) + 2 * half).item() / 4)
    assert not loss.q_continue.any()
    more = segment_loss(logits, torch.zeros(2, 2), targets, 4, torch.tensor([0.3, 0.9]))
    assert more.total.item() == pytest.approx(loss.total.item() + 2 * half / 4)


def test_the_target_of_going_on_is_the_better_of_the_next_two():
    q = torch.tensor([[-1.0, 2.0], [-1.0, 2.0], [3.0, 2.0]], requires_grad=True)
    target = continue_target(q, torch.tensor([False, True, False]))
    assert not target.requires_grad
    torch.testing.assert_close(target, torch.tensor([2.0, -1.0, 3.0]).sigmoid())


def test_halting_is_in_training_alone_and_waits_for_the_least():
    q = torch.tensor([[1.0, 2.0], [1.0, 0.0], [-1.0, -2.0], [-2.0, -1.0]])
    segment, least = torch.tensor([1, 1, 2, 4]), torch.tensor([1, 2, 2, 4])
    hrm, trm = ReasonerConfig(segments=4), ReasonerConfig(segments=4, halting="halt")
    for config, says in ((hrm, [False, True, True, True]), (trm, [True, True, False, True])):
        assert halted(q, segment, None, config, training=True).tolist() == says
    assert halted(q, segment, least, hrm, True).tolist() == [False, False, True, True]
    assert halted(q, segment, None, hrm, False).tolist() == [False, False, False, True]


def test_exploration_is_a_pure_function_of_seed_and_example():
    config = ReasonerConfig(segments=16, exploration=0.1)
    examples = torch.arange(40_000)
    drawn = least_segments(3, examples, config)
    assert torch.equal(least_segments(3, examples[777:800], config), drawn[777:800])
    assert not torch.equal(least_segments(4, examples, config), drawn)
    explored = drawn[drawn > 1]
    assert len(explored) / len(drawn) == pytest.approx(0.1, abs=0.006)
    counts = torch.bincount(explored, minlength=17)[2:]
    assert drawn.max() == 16 and counts.min() > 200 and counts.max() < 340  # 4000 / 15 each
    assert (least_segments(3, examples, ReasonerConfig(exploration=0.0)) == 1).all()
    one = ReasonerConfig(segments=1, exploration=1.0)
    assert (least_segments(3, examples[:9], one) == 1).all()


TRAIN = TrainConfig(optimizer="adam_atan2", lr=3e-2, weight_decay=0.1)


def take_steps(steps, tokens, puzzles, targets):
    """Segments of the same sequences, a step of all optimizers after each; returns the losses."""
    model, batch, losses = Reasoner(small()), len(tokens), []
    optimizer, average, r = (
        make_optimizer(model, TRAIN),
        WeightAverage(model, 0.9),
        small().reasoner,
    )
    least = least_segments(0, torch.arange(batch), r)
    carry, segment = model.start(batch), torch.zeros(batch, dtype=torch.int64)
    for _ in range(steps):
        segment = segment + 1
        made = model(tokens, puzzles, carry)
        with torch.no_grad():
            after = model(tokens, puzzles, made.carry)
        target = continue_target(after.q, segment >= r.segments)
        loss = segment_loss(model.logits(made.n), made.q, targets, batch, target)
        loss.total.backward()
        norm = clip_gradients(model, 0.0)
        step_if_finite(optimizer, norm, TRAIN.lr)
        model.puzzles.step(1e-2, 0.1, skip=~torch.isfinite(norm))
        optimizer.zero_grad()
        average.update()
        ends = halted(made.q.detach(), segment, least, r, training=True)
        carry, segment = model.reset(made.carry, ends), torch.where(ends, 0, segment)
        losses.append(loss.total.detach())
    return losses


def test_steps_read_nothing_back_from_the_device():
    """A fake tensor has no value to read: the host would have to wait for a GPU there."""
    with FakeTensorMode():
        tokens, targets = torch.zeros(2, 3, 5, dtype=torch.int64)
        take_steps(2, tokens, torch.zeros(3, dtype=torch.int64), targets)


def test_steps_lower_the_loss():
    torch.manual_seed(0)
    tokens = torch.randint(0, 7, (4, 5))
    losses = take_steps(60, tokens, torch.arange(4), tokens)
    assert losses[-1] < 0.5 * losses[0]
