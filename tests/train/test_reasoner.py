"""Train reasoners: rows that halt take the next puzzle; a resumed run is the unbroken one."""

import json

import pytest
import torch
from safetensors.torch import load_file

from deeploop.config import Config
from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError
from tests.helpers.data import refused
from tests.helpers.reasoners import KINDS, small_reasoner, write_boards


@pytest.fixture(scope="session")
def boards(tmp_path_factory):
    """A data set of 4x4 Sudoku, small enough that an epoch has few batches."""
    return write_boards(tmp_path_factory.mktemp("puzzles"))


@pytest.fixture
def make(boards, tmp_path):
    def make(kind="hrm", name="run", **train):
        return small_reasoner(boards, tmp_path / name, kind, **train)

    return make


def state(folder, step=6):
    """Every tensor of a checkpoint but the moments."""
    path = folder / "checkpoints" / f"step_{step:06d}"
    return load_file(path / "model.safetensors") | load_file(path / "carried.safetensors")


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_unbroken_one(kind, make, quiet, tmp_path):
    config = make(kind)
    open_run(config, quiet).fit()
    ckpt = checkpoint.find(str(tmp_path / "run" / "checkpoints" / "step_000002"))
    open_run(make(kind, "on"), quiet, ckpt).fit()
    same(state(tmp_path / "run"), state(tmp_path / "on"))
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("run", "on")]
    first, second = ([json.loads(x) for x in some] for some in lines)
    assert [x["loss"] for x in first if "loss" in x] == [x["loss"] for x in second if "loss" in x]


def test_rows_that_halt_take_their_puzzle_of_the_next_batch_and_others_stay(make, quiet):
    trainer = open_run(make("trm"), quiet)
    for step in range(5):
        before = trainer.rows
        new = trainer.examples()
        trainer.step()
        after, halted = trainer.rows, before.halted
        assert halted.all() if step == 0 else True
        for row in range(6):
            given, kept = new.inputs[row], before.examples.inputs[row]
            assert torch.equal(after.examples.inputs[row], given if halted[row] else kept)
            assert after.steps[row] == (1 if halted[row] else before.steps[row] + 1)
        assert after.halted[after.steps == 3].all()  # the last segment
        assert not (
            after.halted & (after.steps < torch.minimum(after.least, torch.tensor(3)))
        ).any()
    trainer.lock.close()


def test_a_row_that_goes_on_starts_from_its_state_and_one_that_halted_from_the_start(make, quiet):
    trainer = open_run(make("hrm", steps=9), quiet)
    trainer.step()
    trainer.rows = trainer.rows._replace(halted=torch.tensor([True, False] * 3))
    carried, seen = trainer.rows.carry, []
    forward = trainer.model.forward
    trainer.model.forward = lambda x, p, carry: seen.append(carry) or forward(x, p, carry)
    trainer.step()
    start = trainer.model.start(1).low[0]
    for row in range(6):
        expected = start if row % 2 == 0 else carried.low[row]
        assert torch.equal(seen[0].low[row], expected)
    trainer.lock.close()


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_make_the_same_step(kind, make, quiet):
    states = []
    for name, micro in (("one", 0), ("three", 2)):
        trainer = open_run(make(kind, name, micro_batch=micro, ema=0.0), quiet)
        trainer.model.double()
        trainer.rows = trainer.rows._replace(carry=trainer.model.start(6))
        for _ in range(3):
            trainer.step()
        states.append(trainer.model.state_dict())
        trainer.lock.close()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_the_average_of_the_weights_is_validated_and_the_weights_go_on(make, quiet, monkeypatch):
    trainer = open_run(make("trm"), quiet)
    trainer.step()
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    seen = []
    monkeypatch.setattr(
        "deeploop.train.reasoner.by_segment",
        lambda model, *_: seen.append({n: p.detach().clone() for n, p in model.named_parameters()}),
    )
    with trainer.averaged():
        trainer.held_out_figures()
    assert seen and all(torch.equal(seen[0][n], trainer.average.average[n]) for n in weights)
    assert not all(torch.equal(seen[0][n], weights[n]) for n in weights)
    assert all(torch.equal(p, weights[n]) for n, p in trainer.model.named_parameters())
    trainer.lock.close()


def test_the_log_and_the_summary_say_what_was_solved(make, quiet, tmp_path):
    summary = open_run(make("hrm"), quiet).fit()
    assert len(summary["val_segment_accuracies"]) == 3 and 1 <= summary["val_segments"] <= 3
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    step = next(x for x in lines if "loss" in x)
    assert {"accuracy", "token_accuracy", "q_halt_loss", "q_continue_loss", "halted"} <= step.keys()


def test_weights_stay_where_a_gradient_is_not_finite(make, quiet):
    trainer = open_run(make("hrm"), quiet)
    trainer.step()
    with torch.no_grad():
        trainer.model.q_head.bias.fill_(float("nan"))
    before = {n: x.clone() for n, x in trainer.model.state_dict().items()}
    trainer.step()
    for name, value in trainer.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    assert trainer.nonfinite
    trainer.lock.close()


def test_puzzle_vectors_are_trained_saved_and_read(make, quiet, tmp_path):
    open_run(make("hrm"), quiet).fit()
    vectors = state(tmp_path / "run")["puzzles.weight"]
    assert vectors.shape == (1, 16) and vectors.abs().min() > 0  # boards share the blank puzzle


@pytest.mark.parametrize(
    ("section", "fields", "words"),
    [
        ("model", {"seq_len": 20}, ("model.seq_len=20", "16 cells")),
        ("model.reasoner", {"puzzles": 0}, ()),
    ],
)
def test_what_does_not_fit_the_puzzles_is_refused(section, fields, words, make, quiet):
    config = make("hrm").replace(section, **fields)
    if words:
        refused(lambda: open_run(config, quiet), *words)
    else:
        trainer = open_run(config, quiet)  # 0 takes the data's
        assert trainer.config.model.reasoner.puzzles == trainer.corpus.puzzles
        trainer.lock.close()


def test_a_reasoner_needs_puzzles_and_puzzles_a_reasoner(make):
    config = make("hrm")
    refused(lambda: config.replace("data", puzzles=""), "cycles_high=2", "data.puzzles")
    refused(lambda: Config(data=config.data), "data.puzzles", "trm-sudoku-tiny")
    refused(lambda: config.replace("train", eval_loops="1,2"), "train.eval_loops='1,2'")
    refused(lambda: config.replace("data", task="parity"), "data.puzzles", "data.task")


def test_other_puzzles_than_the_runs_are_refused(make, quiet, tmp_path):
    open_run(make("trm"), quiet).fit()
    config = make("trm", "on").replace("data", puzzles=write_boards(tmp_path, seed=1))
    with pytest.raises(InputError, match="has other examples"):
        open_run(config, quiet, checkpoint.find(str(tmp_path / "run")))
