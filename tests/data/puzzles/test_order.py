"""The training order: each group once an epoch, one puzzle of it, and no state."""

import numpy as np
import pytest
import torch

from deeploop.data.puzzles import open_puzzles
from deeploop.data.puzzles.order import Order
from tests.helpers.puzzles import write_foreign

# Groups of 3, 1 and 2 puzzles, of 2, 3 and 1 examples each.
PUZZLES = np.array([0, 2, 4, 6, 9, 10, 11])
GROUPS = np.array([0, 3, 4, 6])
OF_GROUP = np.repeat([0, 1, 2], [3, 1, 2])


def epoch(order, seed, number):
    length = order.epoch_examples
    return order.pick(seed, np.arange(number * length, (number + 1) * length))


def test_an_epoch_has_all_examples_of_one_puzzle_of_each_group():
    order = Order(PUZZLES, GROUPS)
    assert order.epoch_examples == 2 + 3 + 1
    for number in range(20):
        examples, puzzles = epoch(order, 7, number)
        drawn = list(dict.fromkeys(puzzles.tolist()))  # in their order: each stays together
        assert sorted(OF_GROUP[drawn]) == [0, 1, 2]
        whole = [row for p in drawn for row in range(PUZZLES[p], PUZZLES[p + 1])]
        assert sorted(examples) == sorted(whole)
        assert (PUZZLES[puzzles] <= examples).all() and (examples < PUZZLES[puzzles + 1]).all()


def test_groups_puzzles_and_examples_are_all_shuffled():
    order = Order(PUZZLES, GROUPS)
    epochs = [epoch(order, 7, number) for number in range(200)]
    firsts = np.array([OF_GROUP[puzzles[0]] for _, puzzles in epochs])
    of_first = np.array([p for _, puzzles in epochs for p in set(puzzles.tolist()) if p < 3])
    second_first = np.mean([np.argmax(examples == 7) < np.argmax(examples == 6)
                            for examples, _ in epochs])  # fmt: skip
    for counts in (np.bincount(firsts), np.bincount(of_first)):
        assert len(counts) == 3 and counts.min() > 40
    assert 0.35 < second_first < 0.65


def test_the_stream_is_a_pure_function_of_seed_and_index():
    index = np.arange(900)
    whole = Order(PUZZLES, GROUPS).pick(3, index)
    shuffled = np.random.default_rng(0).permutation(index)
    order = Order(PUZZLES, GROUPS)
    one_by_one = [order.pick(3, index[i : i + 1]) for i in shuffled[:99]]
    assert [x.examples[0] for x in one_by_one] == whole.examples[shuffled[:99]].tolist()
    assert (order.pick(3, shuffled).puzzles == whole.puzzles[shuffled]).all()
    assert (order.pick(4, index).examples != whole.examples).any()
    assert len(order._epochs) <= 4


def test_a_group_of_unequal_puzzles_gives_as_many_examples_as_the_smallest():
    order = Order(np.array([0, 4, 6]), np.array([0, 2]))
    assert order.epoch_examples == 2
    seen = set()
    for number in range(100):
        examples, puzzles = epoch(order, 0, number)
        assert len(set(examples.tolist())) == 2 and puzzles[0] == puzzles[1]
        seen |= set(examples.tolist())
    assert seen == set(range(6))


def test_ranks_share_a_batch_and_a_later_step_needs_no_earlier_one(tmp_path):
    train = open_puzzles(write_foreign(tmp_path), "train")
    facts = {"seed": 5, "step": 9, "global_batch": 8}
    whole = train.batch(**facts, rows=slice(None))
    ranks = [train.batch(**facts, rows=slice(0, 3)), train.batch(**facts, rows=range(3, 8))]
    fresh = open_puzzles(tmp_path, "train").examples(5, np.arange(72, 80))
    for all_rows, apart, later in zip(whole, zip(*ranks, strict=True), fresh, strict=True):
        assert torch.equal(all_rows, torch.cat(apart)) and torch.equal(all_rows, later)
    with pytest.raises(IndexError):
        train.batch(**facts, rows=range(8, 9))
