"""Conclusions from runs about the papers' claims."""

import pytest

from bench.experiments import papers
from bench.experiments.runs import save
from deeploop.cli.train import parse_train

FLOOR = 4.7


def end(bits: float) -> dict:
    return {"val_bits_per_byte": bits, "unigram_bits_per_byte": FLOOR}


def test_escape():
    assert papers.escaped(end(FLOOR - 1.01 * papers.MARGIN))
    assert not papers.escaped(end(FLOOR - 0.99 * papers.MARGIN))
    assert not papers.escaped({"diverged": "not finite", "unigram_bits_per_byte": FLOOR})


@pytest.mark.parametrize(
    ("values", "sign", "agrees"),
    [
        ([-1, -2], -1, "yes"), ([-1, -2], 1, "**no**"), ([-1, 2], 1, "open"), ([], 1, ""),
        ([1, 1], None, ""), ([1, -1], 0, "yes"), ([1, 2], 0, "**no**"),
    ],
)  # fmt: skip
def test_verdict(values, sign, agrees):
    assert papers.verdict(values, sign) == agrees


def test_differences_are_of_the_same_seed():
    results = {"a --seed 0": end(1), "b --seed 0": end(3), "a --seed 1": end(9)}
    results |= {"a --seed 2": end(1), "b --seed 2": {"diverged": "x"}}
    assert papers.differences(results, "a", "b") == [-2]
    assert papers.compare("", "", [-2], -1).agrees == ""  # one seed is no evidence


@pytest.mark.parametrize("claim", ["p-sweep", "by-loops", "segments", "loom"])
def test_cases_are_what_train_takes(claim):
    for case in papers.cases(claim)[:: len(papers.cases(claim)) - 1]:
        assert parse_train([*case.split(), "--seed", "0"]).config.train.precision == "fp32"


def swept(reached) -> dict:
    """Make a p-sweep of two seeds; a run ends at reached(p, whether lr is the first of its R)."""
    return {
        f"{papers.looped(p, loops, lr)} --seed {seed}": end(reached(p, lr == lrs[0]))
        for loops, lrs in papers.SWEPT.items()
        for lr in lrs
        for p in papers.P
        for seed in (0, 1)
    }


def test_more_escape_as_p_grows():
    rising = swept(lambda p, first: 3 + p / 10 if first or p > 0.4 else FLOOR)
    assert {row.agrees for row in papers.escapes(rising)} == {"yes"}
    assert {row.agrees for row in papers.costs(rising)} == {"yes"}
    assert all(row.here.startswith("+0.035") for row in papers.costs(rising))
    falling = swept(lambda p, first: 3 - p / 10 if first or p < 0.4 else FLOOR)
    assert {row.agrees for row in papers.escapes(falling)} == {"**no**"}
    assert {row.agrees for row in papers.costs(falling)} == {"**no**"}
    uneven = swept(lambda p, first: 3 if first or p == 0.5 else FLOOR)
    assert {row.agrees for row in papers.escapes(uneven)} == {"open"}
    nowhere = swept(lambda p, first: FLOOR)
    assert {row.agrees for row in papers.escapes(nowhere)} == {""}


def test_rules_are_compared_each_at_its_best_learning_rate():
    first, second, third, fourth = papers.LOOPS_LRS
    ends = {
        (0.5, first): [3.0, 3.2], (0.5, second): [2.0, 5.0],
        (None, first): [4.0, 4.0], (None, second): [3.5, 3.5],
    }  # fmt: skip
    results = {
        f"{papers.looped(p, 2, lr)} --seed {seed}": end(bits)
        for (p, lr), runs in ends.items()
        for seed, bits in enumerate(runs)
    }
    lost, alone = papers.looped(None, 2, third), papers.looped(None, 2, fourth)
    results |= {f"{lost} --seed 0": {"diverged": "x"}, f"{lost} --seed 1": end(1.0)}
    results[f"{alone} --seed 0"] = end(1.0)  # a rate with fewer seeds is not chosen
    row = papers.by_loops(results)[papers.LOOPS.index(2)]
    assert row.here == "-0.400 (-0.500 to -0.300)" and row.agrees == "yes"


def test_printing_trains_nothing_and_draws(tmp_path, capsys, pictures):
    file, png = tmp_path / "runs.json", tmp_path / "map.png"
    results = swept(lambda p, first: 3.0)
    results[f"{papers.looped(0.25, 4, papers.SWEPT[4][0])} --seed 0"] = {
        "diverged": "x", "unigram_bits_per_byte": FLOOR,
    }  # fmt: skip
    save(results, file)
    papers.main(["--table", str(file), "--png", str(png)])
    text = capsys.readouterr().out
    assert "| 3.00 1/2, 1 diverged |" in text
    assert png.stat().st_size > 1000
    with pytest.raises(SystemExit, match=r"none\.json"):
        papers.main(["--table", str(tmp_path / "none.json")])
