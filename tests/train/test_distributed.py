"""Two ranks are one rank: same weights, losses, biases and loads, under every plan."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from deeploop.config import Config
from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from deeploop.utils.distributed import Ranks
from tests.helpers.parallel_worker import CASES, train_all
from tests.helpers.ranks import finish, free_port, start_ranks
from tests.helpers.reasoners import small_reasoner, write_boards

DRAWN = 4  # loops of the third step of the plan "drawn"


class Done(NamedTuple):
    """The results of one rank, of both of two, and what these printed of their commands."""

    folder: Path
    one: dict[Any, Any]
    both: tuple[dict[Any, Any], ...]
    printed: list[str]


# One start of Python for all work; each command has a port of its own, as one torchrun each would.
WORK = """
import json, os, sys
from deeploop.cli import main
from tests.helpers.parallel_worker import save_all
corpus, folder, commands = sys.argv[1:]
save_all(corpus, folder)
for port, arguments in json.loads(commands):
    os.environ["MASTER_PORT"] = port
    try:
        code = main(arguments)
    except SystemExit as stop:  # of a rank that leaves the message to another
        code = stop.code
    print("exit code", code, flush=True)
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Train under every plan on one rank and on two, then run some commands on two."""
    folder = tmp_path_factory.mktemp("ranks")
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"line {i % 7}: the quick brown fox {i}\n" for i in range(400)))
    run, taken = folder / "run", folder / "taken"
    taken.mkdir()
    (taken / "mine").write_text("")
    commands = [
        command(corpus, taken, "--steps", "3"),
        command(corpus, run, "--steps", "3", "--train.save-every", "2"),
        ["train", "--resume", str(run), "--steps", "4"],
        ["train", "--config", str(folder / "reasoner.json")],
    ]
    reasoner = small_reasoner(write_boards(folder), folder / "reasoner", "hrm", ema=0.9)
    (folder / "reasoner.json").write_text(reasoner.to_json())
    given = json.dumps([(free_port(), words) for words in commands])
    both = start_ranks(["-c", WORK, str(corpus), str(folder), given])
    one = train_all(str(corpus), folder / "one", Ranks())
    printed = finish(both)
    return Done(folder, one, tuple(torch.load(folder / f"rank-{r}.pt") for r in range(2)), printed)


def command(corpus, out, *more):
    return [
        "train", "loom-tiny", "--data", str(corpus),
        "--model.d-model", "16", "--model.loops", "2", "--model.seq-len", "16",
        "--train.batch-size", "4", "--train.precision", "fp32", "--train.eval-tokens", "256",
        "--train.log-every", "1", "--out", str(out), *more,
    ]  # fmt: skip


@pytest.mark.parametrize(("plan", "micro", "dtype"), CASES)
def test_two_ranks_are_one(done, plan, micro, dtype):
    one, first, second = (r[plan, micro, dtype] for r in (done.one, *done.both))
    for two in (first, second):
        # Losses to 1e-5 in float32; weights of two steps to 1e-9 in float64.
        close = {"rtol": 0, "atol": 1e-9} if dtype == "float64" else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(two["losses"], one["losses"], **close)
        assert two["validation"] == pytest.approx(one["validation"], rel=1e-5)
        if dtype == "float64":
            for name, weight in one["weights"].items():
                torch.testing.assert_close(two["weights"][name], weight, **close)
            torch.testing.assert_close(two["grad_norm"], one["grad_norm"], **close)
            torch.testing.assert_close(two["z"], one["z"], **close)
            assert torch.equal(two["loads"], one["loads"])
            assert all(map(torch.equal, two["biases"], one["biases"]))
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    assert any(b.abs().max() > 0 for b in one["biases"])
    loops = one["loads"].shape[0]
    assert one["loads"].sum() == loops * 2 * 8 * 16 * 2  # layers, tokens, top_k: none missed
    assert loops == (DRAWN if plan == "drawn" else 3)


def test_two_ranks_refuse_train_into_one_folder_and_go_on_together(done):
    run, taken = done.folder / "run", done.folder / "taken"
    lead, other = done.printed
    refused, trained, resumed, *_ = lead.split("exit code")
    assert other.splitlines() == ["exit code 2", *["exit code 0"] * 3]
    assert "already exists" in refused
    assert trained.startswith(" 2") and "2 ranks" in trained and "held out" in trained
    assert resumed.startswith(" 0") and lead.rstrip().endswith("exit code 0")
    steps = {"step_000003", "step_000004"}
    assert {p.name for p in (run / "checkpoints").iterdir()} == steps
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines if "loss" in m] == [1, 2, 3, 4]
    assert json.loads((run / "summary.json").read_text())["step"] == 4
    assert [p.name for p in taken.iterdir()] == ["mine"]


def test_two_ranks_train_a_reasoner_as_one_does(done, quiet):
    """Weights, puzzle vectors, their average, and the rows that both ranks' checkpoint has."""
    config = Config.from_json((done.folder / "reasoner.json").read_text())
    alone = config.replace("train", out=str(done.folder / "alone"))
    open_run(alone, quiet).fit()
    one, two = (tensors(run.train.out) for run in (alone, config))
    assert one.keys() == two.keys() and one["rows.high"].shape[0] == 6
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def tensors(run):
    folder = checkpoint.find(run).path
    return load_file(folder / "model.safetensors") | load_file(folder / "carried.safetensors")
