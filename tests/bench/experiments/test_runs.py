"""Training runs of the experiments: their results, and a sweep that is continued."""

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
    result = runs.train(f"{TINY} --lr 1e30 --seed 0")
    assert "not finite" in result["diverged"] and "val_bits_per_byte" not in result


def test_a_sweep_trains_only_what_its_file_lacks(tmp_path, capfd):
    file = tmp_path / "sub" / "runs.json"
    first, second = wanted = runs.with_seeds([TINY], 2)
    runs.save({first: {"val_bits_per_byte": 1.0}}, file)
    results = runs.sweep(wanted, file, jobs=1)
    assert results == runs.load(file) and list(results) == wanted
    assert results[first] == {"val_bits_per_byte": 1.0}
    assert capfd.readouterr().out.startswith("1/1 ")
    assert results[second] == runs.train(second) | {"device": results[second]["device"]}


def test_seeds_take_turns():
    assert runs.with_seeds(["a", "b", "a"], 2) == [
        "a --seed 0", "b --seed 0", "a --seed 1", "b --seed 1",
    ]  # fmt: skip
    results = {run: {"n": i} for i, run in enumerate(runs.with_seeds(["a", "a --lr 1"], 2))}
    assert runs.by_seed(results, "a") == {0: {"n": 0}, 1: {"n": 2}}


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}'])
def test_a_file_of_something_else_is_refused(text, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"file\.json"):
        runs.load(path)


def test_flags_that_train_refuses():
    with pytest.raises(InputError, match=r"model\.loops"):
        runs.train(f"{TINY} --model.loops 0 --seed 0")
