"""A saved optimizer state that is not the run's is refused in a sentence and changes nothing."""

import zipfile

import pytest
import torch

from deeploop.runs import checkpoint
from tests.helpers.checkpoints import sign, trained_once
from tests.helpers.data import refused


def hostile(change):
    """A change of a saved optimizer state, under the name of its function."""
    HOSTILE[change.__name__] = change
    return change


HOSTILE = {}


@hostile
def no_state(saved):
    del saved["state"]


@hostile
def a_list(saved):
    saved["state"] = [1, 2]


@hostile
def unknown_parameter(saved):
    saved["state"][99] = saved["state"][0]


@hostile
def named_parameter(saved):
    saved["state"]["weight"] = saved["state"].pop(0)


@hostile
def other_groups(saved):
    saved["param_groups"] = saved["param_groups"][:1]


@hostile
def other_order(saved):
    saved["param_groups"][0]["params"].reverse()


@hostile
def other_names(saved):
    saved["param_groups"][0]["param_names"][0] = "x"


@hostile
def names_that_are_lists(saved):
    saved["param_groups"][0]["param_names"] = [[]]


@hostile
def a_name_twice(saved):
    group = saved["param_groups"][0]
    group["param_names"] = [group["param_names"][0]] * len(group["param_names"])


@hostile
def names_missing_of_other_sizes(saved):
    for group in saved["param_groups"]:
        del group["param_names"]
    saved["param_groups"][0]["params"].pop()
    saved["param_groups"][1]["params"] = [i - 1 for i in saved["param_groups"][1]["params"]]


@hostile
def rate_of_text(saved):
    saved["param_groups"][0]["lr"] = "x"


@hostile
def rate_of_nan(saved):
    saved["param_groups"][0]["lr"] = float("nan")


@hostile
def missing_moment(saved):
    del saved["state"][0]["exp_avg"]


@hostile
def moment_of_text(saved):
    saved["state"][0]["exp_avg"] = "x"


@hostile
def short_moment(saved):
    saved["state"][0]["exp_avg_sq"] = torch.zeros(1)


@hostile
def moment_of_terabytes(saved):
    saved["state"][0]["exp_avg"] = torch.zeros(1).expand(2**20, 2**20)


@hostile
def moment_of_integers(saved):
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].long()


@hostile
def sparse_moment(saved):
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].to_sparse()


@hostile
def steps_of_nan(saved):
    saved["state"][0]["step"] = torch.tensor(float("nan"))


@hostile
def several_step_counts(saved):
    saved["state"][0]["step"] = torch.zeros(3)


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_optimizer_state_is_one_sentence(tmp_path, change):
    config, model, optimizer = trained_once()
    path = checkpoint.save(tmp_path, 1, config, model, optimizer)
    saved = torch.load(path / "optimizer.pt")
    change(saved)
    torch.save(saved, path / "optimizer.pt")
    sign(path)
    before = [v.clone() for s in optimizer.state.values() for v in s.values()]
    ckpt = checkpoint.find(str(tmp_path))
    refused(lambda: checkpoint.load_optimizer(ckpt, optimizer, model), path, "optimizer.pt")
    after = [v for s in optimizer.state.values() for v in s.values()]
    assert all(map(torch.equal, before, after))


def test_an_archive_that_unpacks_to_more_than_it_has_is_not_unpacked(tmp_path):
    config, model, optimizer = trained_once()
    path = checkpoint.save(tmp_path, 1, config, model, optimizer)
    with zipfile.ZipFile(path / "optimizer.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("optimizer/data.pkl", bytes(10**7))
    sign(path)
    ckpt = checkpoint.find(str(tmp_path))
    refused(lambda: checkpoint.load_optimizer(ckpt, optimizer, model), "unpacks to more bytes")
