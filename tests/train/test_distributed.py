"""Two ranks are one rank: same weights, losses, biases and loads, under every plan."""

import json
from pathlib import Path

import pytest
import torch

from deeploop.utils.distributed import Ranks
from tests.helpers.parallel_worker import CASES, train_all
from tests.helpers.ranks import finish, start_ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Results of one rank, and of both of two."""
    folder = tmp_path_factory.mktemp("ranks")
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"line {i % 7}: the quick brown fox {i}\n" for i in range(400)))
    worker = str(Path(__file__).parents[1] / "helpers" / "parallel_worker.py")
    both = start_ranks([worker, str(corpus), str(folder)])
    one = train_all(str(corpus), folder / "one", Ranks())
    finish(both)
    return one, *(torch.load(folder / f"rank-{r}.pt") for r in range(2))


@pytest.mark.parametrize(("plan", "micro", "dtype"), CASES)
def test_two_ranks_are_one(runs, plan, micro, dtype):
    one, first, second = (r[plan, micro, dtype] for r in runs)
    for two in (first, second):
        # Losses to 1e-5 in float32; weights of three steps to 1e-9 in float64.
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
    assert one["loads"].sum() == 3 * 2 * 8 * 16 * 2  # loops, layers, tokens, top_k: none missed


def command(config, *more):
    return [
        "-m", "deeploop.cli", "train", "loom-tiny", "--data", config.data.path,
        "--model.d-model", "16", "--model.loops", "2", "--model.seq-len", "16",
        "--train.batch-size", "4", "--train.precision", "fp32", "--train.eval-tokens", "256",
        "--train.log-every", "1", "--out", config.train.out, *more,
    ]  # fmt: skip


def test_a_run_of_two_ranks_leaves_one_folder_and_goes_on(config, tmp_path):
    run = tmp_path / "run"
    lead, other = finish(start_ranks(command(config, "--steps", "3", "--train.save-every", "2")))
    assert "2 ranks" in lead and "held out" in lead and other.strip() == ""
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step_000002", "step_000003"}
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in lines if "loss" in m] == [1, 2, 3]
    resume = ["-m", "deeploop.cli", "train", "--resume", str(run), "--steps", "4"]
    lead, _ = finish(start_ranks(resume))
    assert json.loads((run / "summary.json").read_text())["step"] == 4


def test_a_folder_in_use_is_refused_by_the_ranks_together(config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    lead, other = finish(start_ranks(command(config, "--steps", "3")), code=2)
    assert "already exists" in lead and other.strip() == ""
