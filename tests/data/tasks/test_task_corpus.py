"""A task as what a run trains and validates on: batches, held-out examples, their counts."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deeploop.config import DataConfig
from deeploop.config.data import TASKS
from deeploop.data.batches import IGNORE
from deeploop.data.tasks import load_task
from deeploop.data.tasks.corpus import HELD_OUT_EXAMPLES, TaskCorpus, open_task
from tests.helpers.data import refused

every_task = pytest.mark.parametrize("name", TASKS)


def corpus_of(name="addition", easy="1-3", hard="2-4"):
    return open_task(DataConfig(task=name, difficulty=easy, eval_difficulty=hard), 100)


@settings(max_examples=30)
@given(data=st.data(), step=st.integers(0, 10**9), seed=st.integers(0, 2**63 - 1))
def test_any_split_of_a_batch_reads_the_same_examples(data, step, seed):
    corpus, which = corpus_of(), {"seed": seed, "step": step, "global_batch": 12, "seq_len": 20}
    inputs, targets = corpus.batch(**which, rows=slice(None))
    assert inputs.shape == targets.shape == (12, 20) and inputs.dtype == torch.int64
    cuts = sorted(data.draw(st.lists(st.integers(0, 12), max_size=4)))
    spans = [range(a, b) for a, b in zip([0, *cuts], [*cuts, 12], strict=True)]
    parts = [corpus.batch(**which, rows=span) for span in spans]
    assert torch.equal(torch.cat([x for x, _ in parts]), inputs)
    assert torch.equal(torch.cat([y for _, y in parts]), targets)
    x, y = corpus.batch(**which, rows=slice(1, None, 3))
    assert torch.equal(x, inputs[1::3]) and torch.equal(y, targets[1::3])
    assert corpus.batch_targets(**which) == int((targets != IGNORE).sum())


def test_no_step_reads_an_example_again():
    corpus = corpus_of("parity", "40", "41")
    which = {"seed": 0, "global_batch": 8, "seq_len": 100, "rows": slice(None)}
    rows = torch.cat([corpus.batch(step=step, **which)[0] for step in range(50)])
    assert len(rows.unique(dim=0)) == 400
    other = corpus.batch(step=0, **(which | {"seed": 1}))[0]
    assert not torch.equal(other, rows[:8])


def test_each_difficulty_is_as_frequent_as_the_others():
    corpus = corpus_of("parity", "2-5", "8")
    _, targets = corpus.batch(seed=0, step=3, global_batch=4000, seq_len=20, rows=slice(None))
    bits = (targets != IGNORE).int().argmax(1)  # the answer is predicted after as many tokens
    counts = np.bincount(bits.numpy())
    assert counts[:2].sum() == 0 and abs(counts[2:] / 4000 - 1 / 4).max() < 0.03


@given(batch=st.integers(1, 700), limit=st.integers(1, 5000))
@settings(max_examples=25)
def test_the_first_held_out_targets_are_the_same_whatever_the_batch(batch, limit):
    corpus = corpus_of()
    assert corpus.held_out_targets == int(np.resize([3, 4, 5], HELD_OUT_EXAMPLES).sum())
    pairs = list(corpus.held_out(batch, 16, limit))
    assert all(1 <= len(x) <= batch and x.shape == y.shape for x, y in pairs)
    inputs, targets = (torch.cat(both) for both in zip(*pairs, strict=True))
    ((every, answers),) = corpus.held_out(HELD_OUT_EXAMPLES, 16, corpus.held_out_targets)
    assert torch.equal(inputs, every[: len(inputs)])
    real = targets[targets != IGNORE]
    assert torch.equal(real, answers[answers != IGNORE][:limit])
    assert len(real) == min(limit, corpus.held_out_targets)
    assert (targets != IGNORE).any(1).all()


def test_drawn_held_out_examples_are_held_out_and_none_twice():
    corpus = corpus_of("parity", "2", "40-41")
    assert corpus.held_out_sequences(50) == HELD_OUT_EXAMPLES
    ((every, _),) = corpus.held_out(HELD_OUT_EXAMPLES, 50, HELD_OUT_EXAMPLES)
    known = {tuple(row) for row in every.tolist()}
    drawn = [corpus.draw_held_out(seed, 30, 50)[0].tolist() for seed in (0, 1, 2**63 - 1)]
    for rows in drawn:
        assert len({tuple(row) for row in rows}) == 30 and known.issuperset(map(tuple, rows))
    assert drawn[0] != drawn[1]
    assert corpus.draw_held_out(0, 30, 50)[0].tolist() == drawn[0]


def test_a_guess_reaches_the_logarithm_of_the_number_of_answers():
    assert corpus_of("parity").floors() == {"guessing": pytest.approx(math.log(2))}


def test_another_generator_is_another_corpus():
    """A run is not resumed where a task has come to make other examples."""
    corpus, other = corpus_of("parity"), load_task("parity")
    other.examples = lambda draw, d: tuple(x[::-1] for x in type(other).examples(other, draw, d))
    changed = TaskCorpus("parity", other, corpus.easy, corpus.hard)
    assert corpus.identity() == corpus_of("parity", hard="9").identity() != changed.identity()
    assert corpus.identity() != corpus_of("parity", easy="1-2").identity()


@every_task
def test_a_sequence_that_is_too_short_is_refused(name):
    data = DataConfig(task=name)
    levels = [*data.train_difficulties, *data.eval_difficulties]
    need = max(map(load_task(name).length, levels))
    assert open_task(data, need).vocab_size == load_task(name).vocab_size
    refused(lambda: open_task(data, need - 1), f"model.seq_len={need - 1}", name, need)


def test_the_log_says_what_is_trained_and_held_out():
    line = corpus_of("parity", "1-8", "16").describe()
    assert "parity" in line and "1-8" in line and "16" in line and "1,024" in line
