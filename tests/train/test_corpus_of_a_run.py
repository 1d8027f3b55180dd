"""A run goes on wherever its tokens lie, and only with these; its tokenizer generates."""

import contextlib
import pickle
from pathlib import Path

import numpy as np
import pytest

from deeploop.eval.generate import generate
from deeploop.runs import checkpoint
from deeploop.train.setup import open_run
from deeploop.utils.errors import InputError


def test_a_moved_corpus_is_gone_on_with_and_a_changed_one_refused(config, quiet, tmp_path):
    config = config.replace("train", steps=2)
    text = Path(config.data.path)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    with contextlib.chdir(text.parent):  # the place is stored as it is valid everywhere
        assert open_run(config.replace("data", path=text.name), quiet).fit()["step"] == 2
    found = checkpoint.find(config.train.out)
    assert found.config.data.path == str(text.resolve())
    moved = text.rename(folder / "moved.txt")
    with pytest.raises(InputError, match=r"does not exist.*--data"):
        open_run(found.config, quiet, found)
    more = found.config.replace("train", steps=3).replace("data", path=str(moved))
    assert open_run(more, quiet, found).fit()["step"] == 3
    found = checkpoint.find(config.train.out)
    content = bytearray(moved.read_bytes())
    content[len(content) // 2] ^= 1
    moved.write_bytes(content)
    for changed in (more, more.replace("data", val_fraction=0.2)):
        with pytest.raises(InputError, match=r"changed since the run.*--data.tokenizer"):
            open_run(changed, quiet, found)
    with pytest.raises(InputError, match=r"data\.val_fraction=0: leaves no text.*0\.001"):
        open_run(config.replace("data", val_fraction=0, path=str(moved)), quiet)


@pytest.fixture
def shards(tmp_path):
    """nanoGPT's two files, of the characters "a" to "h"."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for name in ("train.bin", "val.bin"):
        (np.arange(400) % 8).astype("<u2").tofile(folder / name)
    return folder


def test_nanogpts_characters_train_and_generate(config, quiet, shards):
    itos = dict(enumerate("abcdefgh"))
    (shards / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 8, "itos": itos}))
    config = config.replace("data", path=str(shards)).replace("train", steps=2)
    open_run(config, quiet).fit()
    (shards / "meta.pkl").unlink()  # the run has a copy
    [text] = generate(config.train.out, "abc", tokens=5)
    assert text.startswith("abc") and set(text) <= set("abcdefgh") and len(text) == 8
    with pytest.raises(InputError, match=r"characters.json.*'z'"):
        generate(config.train.out, "z")
    with pytest.raises(InputError, match="'byte' is not the one"):
        generate(config.train.out, "a", tokenizer="byte")


def test_a_run_of_nameless_shards_generates_with_the_tokenizer_given(config, quiet, shards):
    config = config.replace("data", path=str(shards)).replace("train", steps=1)
    named = config.replace("data", tokenizer="byte").replace("train", out=config.train.out + "2")
    config = config.replace("model", vocab_size=256)
    open_run(config, quiet).fit()
    with pytest.raises(InputError, match=r"--tokenizer"):
        generate(config.train.out, "\1")
    assert generate(config.train.out, "\1", tokens=2, tokenizer="byte")[0].startswith("\1")
    open_run(named, quiet).fit()
    assert generate(named.train.out, "\1", tokens=2)[0].startswith("\1")
