"""Runs of a bench: what is kept of each, and that a stopped sweep goes on."""

import json

import pytest

from bench.experiments import runs
from deeploop.utils.errors import InputError

TINY = (
    "deeploop-tiny --model.d-model 8 --model.n-heads 1 --model.loops 1 --model.seq-len 16 "
    "--train.batch-size 2 --steps 3 --train.precision fp32 --train.eval-tokens 64"
)


def test_a_run_is_the_same_whatever_ran_before_it():
    first = runs.train(f"{TINY} --seed 1")
    other = runs.train(f"{TINY} --seed 2")
    assert first == runs.train(f"{TINY} --seed 1") != other
    assert first["losses"][-1][0] == 3 and len(first["residual_rms"]) == 1
    assert 4 < first["unigram_bits_per_byte"] < 5 and 6 < first["val_bits_per_byte"] < 9


def test_a_run_that_diverges_says_so():
    found = runs.train(f"{TINY} --lr 1e30 --seed 0")
    assert "not finite" in found["diverged"] and "val_bits_per_byte" not in found


def test_a_sweep_trains_only_what_its_file_lacks(tmp_path, capfd):
    file = tmp_path / "sub" / "runs.json"
    wanted = runs.each([TINY], 2)
    runs.save({wanted[0]: {"val_bits_per_byte": 1.0}}, file)
    found = runs.sweep(wanted, file, jobs=1)
    assert found == runs.load(file) and list(found) == wanted
    assert found[wanted[0]] == {"val_bits_per_byte": 1.0}
    assert capfd.readouterr().out.startswith("1/1 ")
    assert found[wanted[1]] == runs.train(wanted[1]) | {"device": found[wanted[1]]["device"]}


def test_seeds_take_turns():
    assert runs.each(["a", "b", "a"], 2) == ["a --seed 0", "b --seed 0", "a --seed 1", "b --seed 1"]
    found = {run: {"n": i} for i, run in enumerate(runs.each(["a", "a --lr 1"], 2))}
    assert runs.by_seed(found, "a") == {0: {"n": 0}, 1: {"n": 2}}


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', json.dumps({"a": {}})[:-1]])
def test_a_file_of_something_else_is_refused(text, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"file\.json"):
        runs.load(path)
    with pytest.raises(InputError, match=r"none\.json"):
        runs.load(tmp_path / "none.json")


def test_flags_that_train_refuses():
    with pytest.raises(InputError, match=r"model\.loops"):
        runs.train(f"{TINY} --model.loops 0 --seed 0")


def test_spread():
    assert runs.spread([1.0, 2.0, 6.0], ".1f") == "3.0 (1.0 to 6.0)"
    assert (runs.spread([]), runs.spread([1.0])) == ("", "1.000")
