"""A run evaluated by loop: the figures, the files, other text, and what is refused."""

import dataclasses
import json
import math

import pytest

import deeploop
from deeploop.analyze import plots
from deeploop.analyze.evaluate import default_loops, evaluate
from deeploop.config.presets import presets
from deeploop.data.corpus import load_corpus
from deeploop.eval.validate import validate, validate_after
from deeploop.train.setup import open_run
from deeploop.utils.memory import FreeMemory
from tests.helpers.data import refused, train_bpe


def trained(config, quiet, **fields):
    """The path of a run of two steps."""
    config = config.replace("model", **fields).replace("train", steps=2, eval_tokens=64)
    return str(open_run(config, quiet).fit() and config.train.out)


def test_figures_are_those_of_validations(config, quiet, tmp_path):
    run = trained(config, quiet, depth="gate")
    figures = evaluate(run, quiet, loops="1,2,4..8", tokens=300, batch_size=3, device="cpu")
    model, corpus = deeploop.load(run), load_corpus(config.data.path)
    losses = validate_after(model, corpus, range(1, 9), 5, "fp32", 300)
    assert figures["loss"] == pytest.approx([losses[t] for t in range(1, 9)], rel=1e-6)
    assert figures["loss"][1] == pytest.approx(validate(model, corpus, 5, "fp32", 300), rel=1e-6)
    assert figures["tokens"] == 300 and figures["trained_loops"] == 2
    written = json.loads((tmp_path / "run" / "eval-step_000002.json").read_text())
    assert written["kl"][0] is None and math.isnan(figures["kl"][0])
    assert written["kl"][1:] == figures["kl"][1:] and len(written["gate"]["p"]) == 8
    assert (tmp_path / "run" / "eval-step_000002.png").exists()
    said = quiet.file.getvalue()
    rows = [line.split() for line in said.partition("entropy")[2].splitlines()[1:5]]
    assert [" ".join(row[:-8]) for row in rows] == ["1", "trained 2", "4", "8"]
    assert float(rows[1][-8]) == pytest.approx(figures["loss"][1], abs=1e-4)
    for words in ("KL under 0.0005", "gate, probability 0.9", "gate     expected: "):
        assert words in said


def test_the_defaults_are_those_of_the_run(config, quiet):
    figures = evaluate(trained(config, quiet), quiet, device="cpu")
    assert figures["table"] == [1, 2, 3, 4] and figures["tokens"] == 64
    assert "gate" not in figures and "loops_taken" not in figures and "starts" not in figures


def test_tokens_that_halt_and_starts_from_noise(config, quiet, tmp_path):
    run = trained(config, quiet, depth="act", start="noise", inject="adapter")
    out = str(tmp_path / "new" / "mine.json")
    figures = evaluate(run, quiet, loops="3", starts=3, out=out, device="cpu")
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["mine.json", "mine.png"]
    assert figures["starts"]["starts"] == 3 and figures["starts"]["loops"] == [3]
    assert sum(figures["loops_taken"]["shares"]) == pytest.approx(1)
    said = quiet.file.getvalue()
    assert "depth    tokens took 2.00 loops (2: 100.0%)" in said and "distance" in said


def test_other_text_is_read_with_the_runs_own_tokenizer(config, quiet, tmp_path, corpus_file):
    (tmp_path / "bpe").mkdir()
    folder = train_bpe(tmp_path / "bpe", corpus_file.read_text(), 300)
    config = config.replace("data", tokenizer=f"gpt2:{folder}")
    run = trained(config, quiet)
    for file in folder.iterdir():
        file.unlink()
    other = tmp_path / "other.txt"
    other.write_text("the fox jumps over line 3, brown and quick\n" * 50)
    figures = evaluate(run, quiet, loops="2", tokens=0, data=str(other), device="cpu")
    assert figures["data"] == "other.txt"
    tokens = len(load_corpus(str(other)).val)
    assert 1.5 * figures["tokens"] < tokens  # which counts bytes
    assert figures["bits_per_byte"][1] < figures["loss"][1] / math.log(2)


def test_a_task_is_evaluated_at_other_difficulties(config, quiet):
    config = config.replace("data", path="", task="addition", difficulty="1", eval_difficulty="1")
    run = trained(config, quiet)
    easy, hard = (
        evaluate(run, quiet, loops="2", tokens=40, difficulty=d, device="cpu") for d in ("", "2")
    )
    assert easy["loss"] != hard["loss"] and easy["bits_per_byte"] is None
    assert len(easy["exact"]) == 2
    said = quiet.file.getvalue()
    assert "exact" in said and "bits/byte" not in said.partition("measures 40")[2]


def test_what_cannot_be_evaluated_is_refused_and_nothing_written(
    config, quiet, tmp_path, corpus_file, monkeypatch
):
    run = trained(config, quiet)
    before = sorted(tmp_path.rglob("*"))
    for words, given in (
        ("loops='x'", {"loops": "x"}),
        ("tokens=-1", {"tokens": -1}),
        ("batch_size=-2", {"batch_size": -2}),
        ("device='tpu'", {"device": "tpu"}),
        ("nowhere", {"data": "nowhere"}),
        ("starts=2", {"starts": 2}),
        ("needs a data.task", {"difficulty": "3"}),
    ):
        refused(lambda given=given: evaluate(run, quiet, **{"device": "cpu"} | given), words)
    refused(lambda: evaluate(str(tmp_path), quiet), "has no checkpoint")
    with monkeypatch.context() as patch:
        patch.setattr("deeploop.utils.memory.free_memory", lambda _: FreeMemory(2**20, "test"))
        call = lambda: evaluate(run, quiet, batch_size=500, device="cpu")  # noqa: E731
        refused(call, "batch_size=500", "needs at least", "smaller --batch-size")
    corpus_file.write_text("another text. " * 400)
    refused(lambda: evaluate(run, quiet, device="cpu"), "changed since")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_default_table_is_short_and_has_the_loops_of_training():
    assert default_loops(1) == [1, 2] and default_loops(8) == list(range(1, 17))
    for trained_loops in (*range(1, 70), 500):
        lines = default_loops(trained_loops)
        assert {1, trained_loops, 2 * trained_loops} <= set(lines) and len(lines) <= 16
        assert lines[-1] == 2 * trained_loops
    assert all(len(default_loops(c.model.loops)) <= 16 for c in presets().values())


FIGURES = {
    "preset": "x", "step": 3, "trained_loops": 2, "loss": [3.0, 2.0, math.nan],
    "change": [math.nan, 0.5, 0.0], "kl": [math.nan, -1e-9, 0.0],
    "exits": [{"rule": "KL", "loops": 2.5, "loss": 2.0, "left": 0.5}],
}  # fmt: skip
MORE = {
    "gate": {"p": [0.5, 0.25, 0.25]}, "loops_taken": {"mean": 1.5, "shares": [0, 0.5, 0.5, 0]},
    "starts": {"starts": 2, "loops": [2, 3], "cosine": [0.5, 1.0], "distance": [1.0, 0.0]},
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, *({name: MORE[name]} for name in MORE), MORE])
def test_a_picture_has_a_panel_for_each_group_of_figures(more, monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    plots.by_loop(FIGURES | more, tmp_path / "eval.png")
    (figure,) = figures
    loss, change, kl, *rest = figure.axes
    assert len(rest) == len(more)
    assert list(loss.get_lines()[0].get_ydata()) == [3, 2]
    assert list(change.get_lines()[0].get_xdata()) == [2]
    assert len(kl.get_lines()) == 1  # the loops of training alone
    for axes in figure.axes:
        assert axes.get_xlabel() == "loops" and axes.get_lines()[-1].get_xdata()[0] == 2


def test_the_names_of_the_configuration_are_those_of_the_run(config, quiet):
    run = trained(config, quiet)
    figures = evaluate(run, quiet, loops="1", device="cpu")
    assert figures["preset"] == "test" and figures["residual"] == config.model.residual
    assert dataclasses.asdict(deeploop.load(run).config)["depth"] == figures["depth"]
