"""A checkpoint under the names of version 0.1.0 resumes to the bit."""

import hashlib
import json

from safetensors.torch import load_file, save_file

from deeploop.runs import checkpoint
from deeploop.train.setup import open_run

OLD_KEYS = {
    "embed_tokens.weight": "embedding.weight",
    "norm_embed.weight": "gain_embedding",
    "norm_final.weight": "gain_final",
    ".norm_in.weight": ".gain_in",
    ".norm_out.weight": ".gain_out",
}


def as_of_old(path):
    """Rewrite a checkpoint's files with the names and checksums that version 0.1.0 wrote."""
    weights = {}
    for key, value in load_file(path / "model.safetensors").items():
        for new, old in OLD_KEYS.items():
            key = key.replace(new, old)
        weights[key] = value
    assert len([k for k in weights if "gain" in k]) == 2 + 4
    save_file(weights, path / "model.safetensors")
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
