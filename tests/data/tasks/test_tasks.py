"""Every task: answers against a slow solver that reads the text, pure functions, difficulty."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deeploop.data
from deeploop.config.data import TASKS
from deeploop.data.batches import IGNORE
from deeploop.data.tasks import load_task
from deeploop.data.tasks.draw import HELD_OUT, TRAIN, Draw, example_keys
from tests.helpers.data import refused

# By task: weighted sums of two examples' inputs, and the sum of their answers.
PINNED = {
    "reach": [1097, 1479, 93],
    "phop": [7273, 6870, 4],
    "addition": [33, 160, 31],
    "parity": [1, 4, 5],
    "maze": [1888, 2076, 7],
    "regression": [623, 1564, 57],
}
every_task = pytest.mark.parametrize("name", TASKS)


def examples(name, difficulty, n=40, seed=0):
    """Words of n examples that a model reads, and of their answers."""
    task = load_task(name)
    keys = example_keys(seed, TRAIN, np.arange(n, dtype=np.uint64))
    tokens, answers = task.examples(Draw(keys, difficulty), difficulty)
    assert tokens.shape == (n, task.length(difficulty))
    assert answers.shape == (n, task.places(difficulty).sum())
    for ids in (tokens, answers):
        assert ids.min() > 0 and ids.max() < task.vocab_size
    pairs = zip(tokens, answers, strict=True)
    return [(task.text(x).split(), task.text(y).split()) for x, y in pairs]


# Solvers: from the words of an example to (answers, difficulty)


def solve_parity(words):
    bits = words[: words.index("=")]
    return [str(bits.count("1") % 2)], len(bits)


def solve_addition(words):
    a, b = "".join(words).split("=")[0].split("+")
    assert len(a) == len(b)
    return list(str(int(a) + int(b)).zfill(len(a) + 1)), len(a)


def solve_reach(words):
    """Follow each path from its start, edge by edge."""
    reached, hops, most = [], 0, 0
    for word in words:
        starts = len(word) == 1
        hops = 0 if starts else hops + 1
        most = max(most, hops)
        reached.append(word if starts else word[int(reached[-1])])
    return reached, most


def solve_phop(words):
    letters = [w for w in words if w != ">"]
    hops, place = words.count(">"), len(letters) - 1
    for _ in range(hops):
        place = max(j for j in range(1, place + 1) if letters[j - 1] == letters[place])
    return [letters[place]], hops


def solve_regression(words):
    """Try every linear function."""
    pairs = [x.split("=") for x in "".join(words).split(";")]
    points = [(tuple(map(int, x)), int(y or 0)) for x, y in pairs]  # the last y is not read
    k = len(points[0][0])

    def fits(a, shown):
        return all(sum(map(int.__mul__, a, x)) % 7 == y for x, y in shown)

    (a,) = (a for a in itertools.product(range(7), repeat=k) if fits(a, points[:k]))
    return [str(sum(map(int.__mul__, a, x)) % 7) for x, _ in points[k:]], k


def solve_maze(words):
    """Search breadth first."""
    moves = {"N": -5, "E": 1, "S": 5, "W": -1}
    cells = words[:25]
    neighbours = {i: {} for i in range(25)}
    for i, cell in enumerate(cells):
        for letter, move in (("e", "E"), ("s", "S")):
            if letter in cell.split(":")[-1]:
                j = i + moves[move]
                assert j < 25 and (move == "S" or j % 5)
                neighbours[i][move] = j
                neighbours[j][{"E": "W", "S": "N"}[move]] = i
    (start,) = (i for i, cell in enumerate(cells) if cell.startswith("start:"))
    (goal,) = (i for i, cell in enumerate(cells) if cell.startswith("goal:"))
    assert sum(map(len, neighbours.values())) == 2 * 24
    ways, queue = {start: []}, [start]
    for i in queue:
        for move, j in neighbours[i].items():
            if j not in ways:
                ways[j] = [*ways[i], move]
                queue.append(j)
    assert len(ways) == 25  # connected: with 24 passages a tree, so the way is the only one
    return ways[goal], len(ways[goal])


SOLVERS = {
    "parity": solve_parity, "addition": solve_addition, "reach": solve_reach, "phop": solve_phop,
    "regression": solve_regression, "maze": solve_maze,
}  # fmt: skip


@every_task
def test_answers_are_right_and_the_difficulty_is_what_it_says(name):
    most = {"regression": 4, "parity": 40}.get(name, min(TASKS[name].most, 12))
    for difficulty in range(1, most + 1):
        task = load_task(name)
        for words, answers in examples(name, difficulty, n=20):
            assert SOLVERS[name](words) == (answers, difficulty)
            assert 1 <= task.targets(np.array([difficulty]))[0] == len(answers)


@pytest.mark.parametrize("name", ["parity", "phop", "reach", "regression"])
def test_every_answer_is_as_frequent_as_the_others(name):
    rows = [answers for _, answers in examples(name, 3, n=3000)]
    chance = 1 / load_task(name).choices(3)
    for place in range(len(rows[0])):
        _, counts = np.unique([row[place] for row in rows], return_counts=True)
        assert abs(counts / len(rows) - chance).max() < 0.05


@pytest.mark.parametrize("difficulty", [1, 4, 12, 23])
def test_all_edges_of_a_path_matter_to_its_end(difficulty):
    """Another start, or one edge left out, gives another answer two times in three."""
    for skipped in {0, difficulty // 2, difficulty - 1}:
        changed = []
        for words, answers in examples("reach", difficulty, n=2000):
            starts = [i for i, word in enumerate(words) if len(word) == 1] + [len(words)]
            first = next(i for i, j in itertools.pairwise(starts) if j - i == difficulty + 1)
            without = words.copy()
            without[first + 1 + skipped] = "012"  # a hop that changes nothing
            ends = first + difficulty
            changed.append(solve_reach(without)[0][ends] != answers[ends])
        assert abs(np.mean(changed) - 2 / 3) < 0.05


def test_paths_begin_at_any_token():
    begins = [[len(word) == 1 for word in words] for words, _ in examples("reach", 3, n=400)]
    shares = np.mean(begins, 0)
    assert shares[0] == 1 and abs(shares[1:] - 1 / 4).max() < 0.1


@every_task
@settings(max_examples=20)
@given(
    seed=st.integers(-(2**65), 2**65),
    split=st.sampled_from((TRAIN, HELD_OUT)),
    order=st.permutations(range(12)),
)
def test_an_example_depends_on_nothing_but_its_key_and_difficulty(name, seed, split, order):
    task, limit = load_task(name), TASKS[name].most
    index = np.arange(12, dtype=np.uint64) * np.uint64(7919)
    keys = example_keys(seed, split, index)
    difficulty = 1 + np.arange(12) % min(limit, 5)
    seq_len = 80
    inputs, targets = task.sample(keys, difficulty, seq_len)
    mixed = np.array(order)
    again = task.sample(example_keys(seed, split, index[mixed]), difficulty[mixed], seq_len)
    assert np.array_equal(again[0], inputs[mixed]) and np.array_equal(again[1], targets[mixed])
    alone = task.sample(keys[3:4], difficulty[3:4], seq_len)
    assert np.array_equal(alone[0], inputs[3:4]) and np.array_equal(alone[1], targets[3:4])


@every_task
def test_a_sequence_is_an_example_and_padding(name):
    task = load_task(name)
    keys, difficulty = example_keys(0, TRAIN, np.arange(9, dtype=np.uint64)), np.arange(9) % 3 + 1
    inputs, targets = task.sample(keys, difficulty, 80)
    assert inputs.shape == targets.shape == (9, 80) and inputs.dtype == targets.dtype == np.int64
    for x, y, key, d in zip(inputs, targets, keys, difficulty.tolist(), strict=True):
        tokens, answers = task.examples(Draw(key[None], d), d)
        length, places = task.length(d), task.places(d)
        assert np.array_equal(x[:length], tokens[0]) and (x[length:] == 0).all()
        assert np.array_equal(y[:length][places], answers[0])
        assert (y[:length][~places] == IGNORE).all() and (y[length:] == IGNORE).all()
    assert np.array_equal((targets != IGNORE).sum(1), task.targets(difficulty))


@pytest.mark.parametrize("name", [n for n in TASKS if n != "reach"])
def test_answers_follow_the_question_and_are_read_like_a_text(name):
    task, difficulty = load_task(name), np.array([3])
    keys = example_keys(0, TRAIN, np.arange(1, dtype=np.uint64))
    inputs, targets = task.sample(keys, difficulty, task.length(3) + 1)
    for place in np.flatnonzero(targets[0] != IGNORE)[:-1]:
        assert inputs[0, place + 1] == targets[0, place]


def test_no_held_out_example_has_a_training_key():
    index = np.arange(5000, dtype=np.uint64)
    train = [example_keys(seed, TRAIN, index) for seed in (0, 1, 2**63)]
    held_out = [example_keys(seed, HELD_OUT, index) for seed in (0, 1, 2**63)]
    assert not np.isin(np.concatenate(held_out), np.concatenate(train)).any()
    assert len(np.unique(np.concatenate(train + held_out))) == 6 * len(index)
    assert (np.concatenate(train) % 2 == 0).all() and (np.concatenate(held_out) % 2 == 1).all()


def test_numbers_are_drawn_evenly_and_each_key_and_difficulty_draws_others():
    keys = example_keys(0, TRAIN, np.arange(4000, dtype=np.uint64))
    a, b = Draw(keys, 1), Draw(keys, 2)
    first, second, other = a.below(6, 5), a.below(6, 5), b.below(6, 5)
    for one, two in ((first, second), (first, other), (first[1:], first[:-1])):
        assert abs((one == two).mean() - 1 / 6) < 0.02
    assert abs(np.bincount(first.ravel()) / first.size - 1 / 6).max() < 0.02
    assert abs(a.uniform(3).mean() - 0.5) < 0.02
    order = a.order(6)
    assert (np.sort(order, 1) == np.arange(6)).all()
    assert abs(np.bincount(order[:, 0]) / len(order) - 1 / 6).max() < 0.03


@every_task
def test_examples_are_pinned(name):
    """A run resumed under a later version must read on where it stopped."""
    task = load_task(name)
    keys = example_keys(7, TRAIN, np.arange(3, 5, dtype=np.uint64))
    inputs, targets = task.sample(keys, np.array([1, 2]), 80)
    assert [int(inputs[i] @ np.arange(80)) for i in (0, 1)] == PINNED[name][:2]
    assert int(targets[targets >= 0].sum()) == PINNED[name][2]


@pytest.mark.parametrize("name", ["parity", "addition", "phop", "regression"])
def test_the_readmes_examples_are_right(name):
    readme = (Path(deeploop.data.__file__).parent / "README.md").read_text()
    words, answers = re.search(rf"(?m)^\| `{name}` \| `(.*?)` `(.*?)`", readme).groups()
    assert SOLVERS[name](words.split())[0] == answers.split()


def test_an_unknown_task_is_refused():
    refused(lambda: load_task("sorting"), "sorting", "parity")
