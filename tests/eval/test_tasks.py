"""Accuracy on a task: exact examples, right answers, by difficulty and number of loops."""

import math

import pytest
import torch

from deeploop.config import DataConfig, ModelConfig
from deeploop.data.batches import IGNORE
from deeploop.data.tasks import load_task
from deeploop.data.tasks.corpus import open_task
from deeploop.eval.tasks import Matches, accuracy_by_loops, task_accuracy
from deeploop.eval.validate import validate
from deeploop.model.looplm import LoopLM
from tests.helpers.data import refused


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = ModelConfig(
        d_model=16, n_layers=1, loops=2, n_heads=2, vocab_size=13, seq_len=16, inject="add"
    )
    return LoopLM(config)


def test_an_example_is_exact_if_every_answer_is_the_most_likely_token(model):
    matches = Matches(model)
    model.logits = lambda n: n  # so that states are logits
    targets = torch.tensor([[IGNORE, 1, 2], [0, IGNORE, 2], [IGNORE] * 3, [2, 2, 2]])
    n = torch.nn.functional.one_hot(targets.clamp_min(0), 3).float()
    n[1, 2] = torch.tensor([1.0, 0.0, 0.5])  # one of the second example's two answers is wrong
    n[3] = torch.tensor([1.0, 0.0, 0.0])
    matches(n, targets)
    assert matches.shares() == (pytest.approx(1 / 3), pytest.approx(3 / 7))
    matches(n[:1], targets[:1])
    assert matches.shares() == (pytest.approx(2 / 4), pytest.approx(5 / 9))


@torch.no_grad()
@pytest.mark.parametrize("loops", [None, 3])
def test_scores_agree_with_a_plain_computation(model, loops):
    task, examples, model = load_task("addition"), 37, model.train()
    score = task_accuracy(model, task, 2, loops, examples, batch=8)
    (inputs, targets), *_ = open_task(
        DataConfig("", task="addition", eval_difficulty="2"), 16
    ).held_out(examples, 16, 10**6)
    logits = model.logits(model(inputs, loops=loops))
    wanted = targets != IGNORE
    right = (logits.argmax(-1) == targets) | ~wanted
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert score.exact == pytest.approx(right.all(1).float().mean().item())
    assert score.token == pytest.approx(right[wanted].float().mean().item())
    assert score.loss == pytest.approx(loss.item(), rel=1e-5)
    assert model.training


def test_a_validation_has_the_loss_and_the_accuracy_of_its_examples(model):
    corpus = open_task(DataConfig(task="addition", difficulty="1", eval_difficulty="2"), 16)
    for tokens, examples in ((300, 100), (30, 10)):
        matches = Matches(model)
        loss = validate(model, corpus, 7, "fp32", tokens, observe=matches)
        score = task_accuracy(model, corpus.task, 2, examples=examples)
        assert loss == pytest.approx(score.loss, rel=1e-5)
        assert matches.shares() == pytest.approx((score.exact, score.token))


def test_a_table_has_a_score_for_each_difficulty_and_number_of_loops(model):
    task = load_task("addition")
    table = accuracy_by_loops(model, task, [1, 3], [1, 2, 5], examples=9)
    assert {d: list(row) for d, row in table.items()} == {1: [1, 2, 5], 3: [1, 2, 5]}
    assert table[3][5] == task_accuracy(model, task, 3, 5, examples=9)
    assert len({score.loss for row in table.values() for score in row.values()}) == 6
    assert all(math.isfinite(score.loss) for row in table.values() for score in row.values())


def test_examples_that_the_model_cannot_read_are_refused(model):
    task = load_task("addition")
    refused(lambda: task_accuracy(model, task, 6), "difficulty=6", "20 tokens", "16")
    refused(lambda: task_accuracy(model, task, 1, examples=0), "examples=0")
