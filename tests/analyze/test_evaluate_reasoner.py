"""deeploop eval of a reasoner: its files, what is refused, and early answers."""

import io
import json

import pytest
import torch
from rich.console import Console

from deeploop.analyze.evaluate import evaluate
from deeploop.analyze.evaluate_reasoner import load_reasoner
from deeploop.data.puzzles.puzzle_set import Examples
from deeploop.data.puzzles.source import open_source
from deeploop.eval.boards import answer, by_segment
from deeploop.eval.generate import load
from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from tests.helpers.data import refused
from tests.helpers.reasoners import small_reasoner, write_boards


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reasoner")
    config = small_reasoner(write_boards(folder), folder / "run", "hrm", steps=3)
    open_run(config, Console(file=io.StringIO())).fit()
    return str(folder / "run")


def test_figures_are_those_of_a_slow_loop(run):
    ckpt = checkpoint.find(run)
    trainer_config, model = ckpt.config, load_reasoner(ckpt, torch.device("cpu"))
    with torch.no_grad():  # so that some halt early and others late
        model.q_head.weight.normal_(std=3, generator=torch.Generator().manual_seed(0))
        model.q_head.bias.zero_()
    corpus = open_source(trainer_config.data.puzzles)
    measured = by_segment(model, corpus, trainer_config, 5, tokens=0)
    (every,) = corpus.held_out_examples(100, corpus.held_out_targets)
    carry, exact, ends, wanted = model.start(len(every.inputs)), [], {}, set()
    for segment in range(1, 4):
        with torch.no_grad():
            end = model(every.inputs, every.puzzles, carry)
        carry = end.carry
        right = (model.logits(end.n).argmax(-1) == every.targets).all(1)
        exact.append(right.float().mean().item())
        for row in range(len(right)):
            if end.q[row, 0] > end.q[row, 1]:
                wanted.add(row)
            if row not in ends and (row in wanted or segment == 3):
                ends[row] = segment
    assert measured.exact == pytest.approx(exact)
    assert measured.mean_segments == pytest.approx(sum(ends.values()) / len(ends))
    assert len(set(ends.values())) > 1  # the test needs both
    labels, taken = answer(model, trainer_config, every)
    assert taken.tolist() == [ends[row] for row in range(len(ends))]
    assert measured.wants[-1] == pytest.approx(len(wanted) / len(ends))
    whole, all_taken = answer(model, trainer_config, every, early=False)
    assert (all_taken == 3).all()
    late = taken == 3
    assert torch.equal(labels[late], whole[late])
    some = Examples(*(x[1:4] for x in every))
    assert torch.equal(answer(model, trainer_config, some)[0], labels[1:4])


def test_files_and_table(run, quiet, tmp_path):
    figures = evaluate(run, quiet, out=str(tmp_path / "e.json"))
    stored = json.loads((tmp_path / "e.json").read_text())
    assert stored == json.loads(json.dumps(figures)) and (tmp_path / "e.png").exists()
    assert len(figures["exact"]) == 3 and figures["early_ms"] > 0 and figures["step"] == 3


def test_the_average_of_the_weights_is_read(run):
    ckpt = checkpoint.find(run)
    model = load_reasoner(ckpt, torch.device("cpu"))
    raw = load_reasoner(
        checkpoint.Checkpoint(
            ckpt.path, ckpt.step, ckpt.config.replace("train", ema=0.0), ckpt.sha256
        ),
        torch.device("cpu"),
    )
    assert not torch.equal(model.lm_head.weight, raw.lm_head.weight)


def test_options_of_loops_and_commands_of_language_models_are_refused(run, quiet):
    refused(lambda: evaluate(run, quiet, loops="1,2"), "loops=1,2", "segments")
    refused(lambda: evaluate(run, quiet, starts=2), "starts=2", "segments")
    refused(lambda: load(run), "cycles_high=2", "language models")
