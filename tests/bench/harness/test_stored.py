"""Stored results: every file under bench/results is still read, under today's names."""

import json
from pathlib import Path

import pytest

from bench.experiments import ablation, kappa, papers, runs
from bench.harness import report
from bench.harness.stored import read_json, renamed
from deeploop.cli.train import parse_train
from deeploop.utils.errors import InputError

RESULTS = Path(__file__).parents[3] / "bench" / "results"
EARLIER = ('"arm"', '"plan"', '"baseline"', "model.arm", "train.plan")


def test_earlier_names_are_replaced_wherever_they_are():
    old = {"case": {"arm": "baseline", "n": 1}, "a --model.arm baseline --train.plan last": []}
    new = {
        "case": {"residual": "pre_norm", "n": 1},
        "a --model.residual pre_norm --train.backprop last": [],
    }
    assert renamed([old, new]) == [new, new]


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_stored_file_is_read(path):
    content = read_json(path)
    assert not any(name in json.dumps(content) for name in EARLIER)
    if "benchmarks" in content:
        records, others = report.load([path])
        assert len(records) == len(content["benchmarks"]) and not others
    elif path.stem.startswith("kappa"):
        assert "| pre_norm | 150 |" in kappa.markdown(content)
    else:
        # `deeploop train` takes a run's flags; one run for each set of flags.
        by_flags = {tuple(w for w in run.split() if w[:2] == "--"): run for run in runs.load(path)}
        for run in by_flags.values():
            parse_train(run.split())


def test_conclusions_from_the_stored_runs():
    results = runs.load(RESULTS / "loom-arms-cpu-2026-11-30.json")
    table = ablation.ablation_table(ablation.ablations(), results)
    assert "| native | 2.392 (2.368 to 2.408) |" in table
    agrees = [row.agrees for row in papers.components(results)]
    assert agrees == ["**no**", "open", "open", "yes", "open"]
    results = runs.load(RESULTS / "papers-cpu-2026-11-30.json")
    assert [row.agrees for row in papers.escapes(results)] == ["yes", "yes", "open"]
    assert {row.agrees for row in papers.by_loops(results)} == {"**no**"}


@pytest.mark.parametrize(("name", "text"), [("none.json", None), ("wrong.json", "not JSON")])
def test_a_file_that_cannot_be_read_is_named(name, text, tmp_path):
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=name):
        read_json(tmp_path / name)
