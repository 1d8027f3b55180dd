"""Loops drawn for a step are a pure function of (seed, step, row), with the law they name."""

import itertools
import math
from collections import Counter

import pytest

from deeploop.config import Config, TrainConfig
from deeploop.config.backprop import segments
from deeploop.config.loop_count import (
    listed_loops,
    loops_of_sequences,
    loops_of_step,
    mean_loops,
    poisson_quantile,
)
from deeploop.utils.errors import InputError


def draws(steps=4000, loops=32, **fields):
    t = TrainConfig(loop_count="poisson", **fields)
    return [loops_of_step(t, loops, step) for step in range(steps)]


def test_draws_stay_the_same_in_every_version():
    assert draws(10) == [41, 51, 38, 43, 13, 34, 19, 17, 50, 45]
    assert draws(4, seed=1) == [24, 18, 19, 71]
    t = TrainConfig(loop_count="poisson", loop_count_per="sequence", batch_size=4)
    assert loops_of_sequences(t, 8, step=3) == [11, 4, 12, 8]
    assert loops_of_step(t, 8, step=3) == 12


def test_the_mean_is_one_above_model_loops_as_huginn_writes_it():
    """Log-normal with sigma 1/2 around 32: mean 33, variance 32 + 32^2 (e^(1/4) - 1)."""
    drawn = draws(20_000)
    mean = sum(drawn) / len(drawn)
    variance = sum((x - mean) ** 2 for x in drawn) / len(drawn)
    deviation = math.sqrt(32 + 32**2 * math.expm1(0.25))
    assert mean == pytest.approx(33, abs=4 * deviation / math.sqrt(len(drawn)))
    assert variance == pytest.approx(deviation**2, rel=0.05)
    assert mean_loops(TrainConfig(loop_count="poisson"), 32) == 33


def test_without_sigma_it_is_a_poisson_law():
    counts = Counter(draws(20_000, loops=3, loop_sigma=0.0))
    for k in range(6):
        wanted = math.exp(-3) * 3**k / math.factorial(k)
        assert counts[k + 1] / 20_000 == pytest.approx(wanted, abs=0.012)


def test_quantiles_of_a_poisson_law():
    for rate in (0.3, 4.0, 400.0):
        for u in (1e-12, 0.01, 0.5, 0.99, 1 - 2**-53):
            k = poisson_quantile(rate, u)
            terms = [math.exp(i * math.log(rate) - rate - math.lgamma(i + 1)) for i in range(k + 1)]
            assert math.fsum(terms[:-1]) < u <= math.fsum(terms) + 1e-9


def test_large_rates_are_drawn_too():
    drawn = draws(50, loops=3000, loop_sigma=0.0)
    assert sum(drawn) / 50 == pytest.approx(3001, abs=4 * math.sqrt(3000 / 50))


def test_a_set_is_drawn_evenly():
    t = TrainConfig(loop_count="set", loop_set="2,4, 8")
    counts = Counter(loops_of_step(t, 4, step) for step in range(3000))
    assert set(counts) == {2, 4, 8}
    assert all(abs(n / 3000 - 1 / 3) < 0.04 for n in counts.values())
    assert mean_loops(t, 4) == pytest.approx(14 / 3)


def test_sequences_of_a_step_differ_and_a_batch_of_one_draw_is_of_one_number():
    each = TrainConfig(loop_count="poisson", loop_count_per="sequence", batch_size=64)
    drawn = loops_of_sequences(each, 8, step=0)
    assert len(set(drawn)) > 4 and loops_of_step(each, 8, 0) == max(drawn)
    one = TrainConfig(loop_count="poisson", batch_size=64)
    assert set(loops_of_sequences(one, 8, step=0)) == {loops_of_step(one, 8, 0)}


def test_the_last_loops_of_a_step_get_gradients_however_few_it_has():
    """Huginn: max(r - k, 0) loops without gradient, then min(k, r) with it."""
    t = TrainConfig(loop_count="poisson", backprop="last", backprop_loops=4)
    for step in range(200):
        (s,) = segments(t, 5, step)
        r = loops_of_step(t, 5, step)
        assert s.no_grad_loops == range(max(r - 4, 0)) and len(s.loops) == min(4, r)
        assert s.from_start and s.loops.stop == r


def test_progressive_draws_every_pair_evenly():
    """n from [0, R), k from [1, R - n], as in arXiv 2202.05826; both losses start anew."""
    t = TrainConfig(backprop="progressive", progressive_weight=0.25)
    pairs = Counter()
    for step in range(6000):
        drawn, whole = segments(t, 4, step)
        assert (drawn.weight, whole.weight) == (0.25, 0.75) and whole.loops == range(4)
        assert drawn.from_start and whole.from_start
        pairs[len(drawn.no_grad_loops), len(drawn.loops)] += 1
    wanted = {(n, k): 1 / 4 / (4 - n) for n in range(4) for k in range(1, 5 - n)}
    assert pairs.keys() == wanted.keys()
    assert all(abs(pairs[p] / 6000 - share) < 0.025 for p, share in wanted.items())
    only = TrainConfig(backprop="progressive", progressive_weight=1.0)
    assert [s.weight for s in segments(only, 4)] == [1.0]


@pytest.mark.parametrize("listed", ["", "0,2", "two", "2,,4", "-1"])
def test_what_is_no_set_is_refused(listed):
    with pytest.raises(InputError, match=r"train\.loop_set="):
        TrainConfig(loop_count="set", loop_set=listed)


def test_combinations_without_a_meaning_are_refused():
    cases = [
        ({"loop_count": "often"}, {}, "train.loop_count='often'"),
        ({"loss": "first"}, {}, "train.loss='first'"),
        ({}, {"depth": "deep"}, "model.depth='deep'"),
        ({"loss": "expected"}, {}, "give --model.depth gate"),
        ({"loss": "ponder", "backprop": "segments"}, {"depth": "gate"}, "train.backprop=full"),
        ({"backprop": "segments"}, {"depth": "act"}, "model.depth=act: needs train.backprop=full"),
        ({"loop_count_per": "sequence", "loss": "each"}, {}, "loop_count_per=sequence"),
        ({"loop_count_per": "sequence", "backprop": "segments"}, {}, "loop_count_per=sequence"),
        # After n + k loops a sequence that starts later may not have run at all.
        ({"loop_count_per": "sequence", "backprop": "progressive"}, {}, "loop_count_per=sequence"),
        # A sequence that has not started must not add up halting probabilities.
        ({"loop_count_per": "sequence"}, {"depth": "act"}, "model.depth=act ends each token"),
        ({"backprop": "last", "backprop_loops": 9}, {}, "must not exceed model.loops"),
    ]
    for train, model, message in cases:
        with pytest.raises(InputError, match=message.replace("'", ".")):
            Config().replace("model", **model).replace("train", **train)
    for drawn, per in itertools.product(("poisson", "fixed"), ("batch", "sequence")):
        Config().replace("train", loop_count=drawn, loop_count_per=per)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", [3]),
        ("8,1,2,2", [1, 2, 8]),
        ("1..4", [1, 2, 3, 4]),
        ("1,3..8", [1, 3, 5, 7]),
        ("1,2..5", [1, 2, 3, 4, 5]),
        ("1,2,4..32", [1, 2, 4, 8, 16, 32]),
        ("1,3,9..80", [1, 3, 9, 27]),
        ("2,3,4..6,12", [2, 3, 4, 5, 6, 12]),
        ("4..4", [4]),
    ],
)
def test_two_dots_go_on_with_the_numbers_before_them(text, numbers):
    assert listed_loops(text, "loops") == numbers
    assert TrainConfig(eval_loops=text).eval_loops == text


@pytest.mark.parametrize(
    "text", ["a", "0", "-1..3", "1,,2", "1..", "..4", "8..4", "3,2..9", "1,1..4", "1...4", "1..1e3",
             "65537", "1..10000000000000", "9" * 5000],
)  # fmt: skip
def test_a_list_of_loops_that_is_none_is_refused(text):
    with pytest.raises(InputError, match=r"^train\.eval_loops='.* such as 1,2,8") as refused:
        TrainConfig(eval_loops=text)
    assert len(str(refused.value)) < 300
    with pytest.raises(InputError, match=r"^loops=''"):
        listed_loops("", "loops")
