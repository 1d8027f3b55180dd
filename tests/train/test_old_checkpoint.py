"""A checkpoint under the names of version 0.1.0 resumes to the bit."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from deeploop.model.looplm import LoopLM
from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from tests.helpers.checkpoints import sign

OLD_KEYS = {
    "embed_tokens.weight": "embedding.weight",
    "norm_embed.weight": "gain_embedding",
    "norm_final.weight": "gain_final",
    ".norm_in.weight": ".gain_in",
    ".norm_out.weight": ".gain_out",
}


def without_names(path):
    """Rewrite an optimizer's state as it was before its groups had names."""
    saved = torch.load(path / "optimizer.pt")
    for group in saved["param_groups"]:
        del group["param_names"]
    torch.save(saved, path / "optimizer.pt")


def in_two_groups(path):
    """Rewrite it as it was before some weights had a group of their own, without decay."""
    saved = torch.load(path / "optimizer.pt")
    decayed, others, kept = saved["param_groups"]
    numbers = {
        name: number
        for group in saved["param_groups"]
        for name, number in zip(group.pop("param_names"), group["params"], strict=True)
    }
    shapes = LoopLM(checkpoint.find(str(path)).config.model).named_parameters()
    order = [numbers[name] for name, _ in sorted(shapes, key=lambda named: named[1].dim() < 2)]
    matrices = len(decayed["params"]) + sum(
        saved["state"][i]["exp_avg"].dim() > 1 for i in kept["params"]
    )
    saved["state"] = {new: saved["state"][old] for new, old in enumerate(order)}
    saved["param_groups"] = [
        decayed | {"params": list(range(matrices))},
        others | {"params": list(range(matrices, len(order)))},
    ]
    torch.save(saved, path / "optimizer.pt")


def as_of_old(path):
    """Rewrite a checkpoint's files with the names and checksums that version 0.1.0 wrote."""
    weights = {}
    for key, value in load_file(path / "model.safetensors").items():
        for new, old in OLD_KEYS.items():
            key = key.replace(new, old)
        weights[key] = value
    assert len([k for k in weights if "gain" in k]) == 2 + 4
    save_file(weights, path / "model.safetensors")
    without_names(path)
    state = json.loads((path / "state.json").read_text())
    model, train = state["config"]["model"], state["config"]["train"]
    model["arm"] = model.pop("residual")
    del model["prelude"], model["coda"]
    train["plan"], train["plan_loops"] = train.pop("backprop"), train.pop("backprop_loops")
    (path / "corpus.json").unlink()
    state["sha256"] = {
        name: hashlib.sha256((path / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "optimizer.pt")
    }
    (path / "state.json").write_text(json.dumps(state))


def test_an_old_checkpoint_resumes_to_the_bit(config, quiet, tmp_path):
    unbroken = open_run(config, quiet).fit()
    path = tmp_path / "run" / "checkpoints" / "step_000010"
    as_of_old(path)
    half = checkpoint.find(str(path))
    again = open_run(half.config.replace("train", out=str(tmp_path / "fork")), quiet, half).fit()
    assert again["val_loss"] == unbroken["val_loss"]


@pytest.mark.parametrize("written", [without_names, in_two_groups])
def test_moments_follow_a_weight_into_another_group(config, quiet, tmp_path, written):
    """Parcae's recurrence has moved to a group without decay; without any decay it is the same."""
    config = config.replace("model", inject="contractive", readout_map=True)
    config = config.replace("train", weight_decay=0.0)
    unbroken = open_run(config, quiet).fit()
    path = tmp_path / "run" / "checkpoints" / "step_000010"
    written(path)
    sign(path)
    half = checkpoint.find(str(path))
    again = open_run(half.config.replace("train", out=str(tmp_path / "fork")), quiet, half).fit()
    assert again["val_loss"] == unbroken["val_loss"]
