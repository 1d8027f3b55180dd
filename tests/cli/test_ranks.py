"""Under torchrun one rank says why a run is refused or ended."""

import contextlib

import pytest

from deeploop.cli import main
from deeploop.cli.ranks import on_every_rank, one_speaks
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import Diverged, InputError


class Several(Ranks):
    """A rank of two; `refusing` are the ranks where the work fails."""

    refusing: tuple[int, ...] = ()

    def first_rank(self, flag):
        return min(self.refusing, default=None)


def refuse():
    raise InputError("no such corpus")


@pytest.mark.parametrize(
    ("rank", "refusing", "speaks"),
    [(0, (0, 1), True), (1, (0, 1), False), (1, (1,), True), (0, (1,), False)],
)
def test_the_first_rank_that_refuses_speaks_and_all_stop(rank, refusing, speaks):
    ranks = Several(rank, 2)
    ranks.refusing = refusing
    with pytest.raises(InputError if speaks else SystemExit) as stopped:
        on_every_rank(ranks, refuse if rank in refusing else lambda: "a trainer")
    assert speaks or stopped.value.code == 2


@pytest.mark.parametrize("verb", ["train", "profile"])
@pytest.mark.parametrize("rank", [0, 1])
def test_options_that_every_rank_refuses_are_named_once(verb, rank, capsys, monkeypatch):
    ranks = Several(rank, 2)
    ranks.refusing = (0, 1)
    place = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "deeploop.utils.distributed.init_distributed", lambda: contextlib.nullcontext(ranks)
    )
    code = 2
    with contextlib.suppress(SystemExit) if rank else contextlib.nullcontext():
        code = main([verb, "--model.loops", "0"])
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == said.count("model.loops=0") == (rank == 0)


@pytest.mark.parametrize(
    ("verb", "opens"),
    [("train", "train.setup.open_run"), ("profile", "analyze.profile.profile.open_profile")],
)
def test_a_rank_waits_for_no_message_of_one_whose_options_were_refused(verb, opens, monkeypatch):
    """Opening a run exchanges messages, which a rank without a run does not send."""
    ranks, opened = Several(0, 2), []
    ranks.refusing = (1,)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        "deeploop.utils.distributed.init_distributed", lambda: contextlib.nullcontext(ranks)
    )
    monkeypatch.setattr(f"deeploop.{opens}", lambda *args: opened.append(args))
    with pytest.raises(SystemExit) as stopped:
        main([verb])
    assert stopped.value.code == 2 and not opened


@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_that_diverges_is_reported_by_the_main_rank(rank):
    with pytest.raises(SystemExit if rank else Diverged), one_speaks(Ranks(rank, 2)):
        raise Diverged("loss is not finite")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_lost_another_leaves_without_a_traceback(rank):
    with pytest.raises(SystemExit if rank else InputError), one_speaks(Ranks(rank, 2)):
        raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed")


@pytest.mark.parametrize("world", [1, 2])
def test_a_bug_keeps_its_traceback(world):
    with pytest.raises(RuntimeError, match="shape"), one_speaks(Ranks(world - 1, world)):
        raise RuntimeError("shape mismatch")
