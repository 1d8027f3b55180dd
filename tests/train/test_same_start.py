"""Ranks that would not train the same are refused, by the name of what differs."""

from pathlib import Path

import pytest

from deeploop.train.same_start import prepare_together
from deeploop.train.setup import open_run
from deeploop.utils.distributed import Ranks
from deeploop.utils.errors import InputError
from tests.helpers.data import refused


class OfTwo(Ranks):
    """Rank 1 of two; the main rank's side is given."""

    def gather(self, value):
        return [self.main, value]


def ranks_of_two(main):
    ranks = OfTwo(1, 2)
    ranks.main = main
    return ranks


def start_of(config, quiet):
    """The start of a run as one rank alone makes it."""
    starts = []
    with pytest.MonkeyPatch.context() as patch:

        def note(ranks, prepare):
            starts.append(prepare())
            raise InputError("enough")

        patch.setattr("deeploop.train.setup.prepare_together", note)
        with pytest.raises(InputError, match="enough"):
            open_run(config, quiet)
    return starts[0]


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("train", {"lr": 0.5}, "train.lr: 0.0015 on rank 0, 0.5 on rank 1"),
        ("train", {"seed": 7}, "train.seed: 0 on rank 0, 7 on rank 1"),
        ("train", {"batch_size": 8}, "train.batch_size: 4 on rank 0, 8 on rank 1"),
        ("data", {"val_fraction": 0.2}, "data.val_fraction: 0.1 on rank 0"),
    ],
)
def test_another_option_on_a_rank_is_named(config, quiet, section, values, named):
    main = start_of(config, quiet)
    mine = start_of(config.replace(section, **values), quiet)
    ranks = ranks_of_two((main.facts(), main.folder, ""))
    refused(lambda: prepare_together(ranks, lambda: mine), named, "the same options")


def test_another_corpus_on_a_rank_is_named(config, quiet, corpus_file):
    main = start_of(config, quiet)
    ranks = ranks_of_two((main.facts(), main.folder, ""))
    corpus_file.write_text(corpus_file.read_text().replace("quick", "quack"))
    mine = start_of(config, quiet)
    refused(lambda: prepare_together(ranks, lambda: mine), "the corpus's fingerprint")


def test_places_may_differ_and_the_folder_is_the_main_ranks(config, quiet, tmp_path):
    main = start_of(config, quiet)
    copy = tmp_path / "copy" / "corpus.txt"
    copy.parent.mkdir()
    copy.write_bytes(Path(config.data.path).read_bytes())
    elsewhere = config.replace("data", path=str(copy)).replace("train", out=str(tmp_path / "b"))
    ranks = ranks_of_two((main.facts(), main.folder, ""))
    start = prepare_together(ranks, lambda: start_of(elsewhere, quiet))
    assert start.folder == tmp_path / "run"


def test_a_rank_that_was_refused_stops_the_others_with_its_reason(config, quiet):
    mine = start_of(config, quiet)
    ranks = ranks_of_two(({}, Path(), "no such corpus"))
    refused(lambda: prepare_together(ranks, lambda: mine), "rank 0: no such corpus")

    def fails():
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        prepare_together(ranks_of_two((mine.facts(), mine.folder, "")), fails)
