"""deeploop convert, and runs that start from another run's weights."""

import json
import re
import shutil

import pytest
import torch

import deeploop
from deeploop.cli import main
from deeploop.cli.convert import ConvertArguments
from deeploop.config.fields import entries
from deeploop.model.convert.recursion import INITS
from deeploop.runs import checkpoint
from deeploop.train.parents import find_parents
from deeploop.train.setup import open_run
from tests.helpers.data import refused, train_bpe


@pytest.fixture
def plain(config, quiet, tmp_path):
    """The configuration of a run without loops, and its folder."""
    config = config.replace("model", residual="pre_norm", n_layers=4, loops=1)
    config = config.replace("train", out=str(tmp_path / "plain"), steps=4, save_every=0)
    open_run(config, quiet).fit()
    return config


def run(capsys, *arguments):
    code = main([str(word) for word in arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def final_states(path, loops=None):
    x = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return deeploop.load(str(path))(x, loops=loops)


def test_a_converted_run_generates_and_trains_with_its_parent_as_teacher(capsys, plain, tmp_path):
    old, new = tmp_path / "plain", tmp_path / "new"
    code, said, _ = run(capsys, "convert", old, "--loops", 2, "--rank", 3, "--out", new)
    assert code == 0 and "2 blocks x 2 loops, LoRA rank 3 in each loop" in said
    assert re.search(r"[\d,]+ parameters of [\d,]+ before", said)
    assert f"--resume {new} --train.teacher {old}" in said
    assert (new / "corpus.json").read_bytes() == (old / "corpus.json").read_bytes()
    changed = {
        e.name for e, f in zip(
            entries(checkpoint.find(str(new)).config), entries(checkpoint.find(str(old)).config),
            strict=True,
        ) if e.value != f.value
    }  # fmt: skip
    assert changed == {"model.n_layers", "model.loops", "model.lora_rank", "train.out"}
    code, said, _ = run(capsys, "generate", new, "--prompt", "the", "--tokens", 4)
    assert code == 0 and said.startswith("the")
    onward = ["train", "--resume", new, "--train.teacher", old]
    assert run(capsys, *onward, "--steps", 3)[0] == 0
    assert [p.name for p in checkpoint.steps(new)] == ["step_000000", "step_000003"]
    code, said, _ = run(capsys, *onward, "--steps", 6)
    assert code == 0 and f"teacher  {old}, weight 0.5" in said
    line = json.loads((new / "metrics.jsonl").read_text().splitlines()[-2])
    assert line["step"] == 6 and line["teacher_divergence"] > 0


@pytest.mark.parametrize("init", INITS)
def test_full_rank_is_the_same_model_in_as_many_loops(capsys, plain, tmp_path, init):
    out = tmp_path / init
    arguments = ("--loops", 2, "--init", init, "--rank", 16, "--out", out)
    assert run(capsys, "convert", tmp_path / "plain", *arguments)[0] == 0
    before = final_states(tmp_path / "plain")
    torch.testing.assert_close(final_states(out), before, rtol=1e-4, atol=1e-4)
    assert (final_states(out, loops=1) - before).abs().max() > 1e-2


def test_inits_of_the_command_are_those_of_the_conversion():
    assert set(ConvertArguments.__annotations__["init"].__origin__.__args__) == set(INITS)


BAD = {
    "missing run": (["nowhere", "--loops", "2"], "run 'nowhere'"),
    "loops that do not divide": (["plain", "--loops", "3"], "loops=3"),
    "one loop": (["plain", "--loops", "1"], "loops=1"),
    "no loops": (["plain"], "--loops"),
    "rank below 0": (["plain", "--loops", "2", "--rank", "-1"], "model.lora_rank=-1"),
    "rank above full": (["plain", "--loops", "2", "--rank", "17"], "model.d_model=16"),
    "unknown init": (["plain", "--loops", "2", "--init", "best"], "--init"),
    "folder in use": (["plain", "--loops", "2", "--out", "plain"], "train.out="),
    "looped already": (["looped", "--loops", "2"], "model.loops=2"),
}


def test_what_cannot_be_converted_is_refused_in_one_sentence(capsys, plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "convert", "plain", "--loops", 2, "--out", "looped")[0] == 0
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    for name, (arguments, named) in BAD.items():
        code, _, said = run(capsys, "convert", *arguments)
        sentence = said.splitlines()[0]
        assert code == 2 and named in sentence, name
        assert sentence.startswith("deeploop convert: ") and "Traceback" not in said, name
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_a_run_starts_from_the_weights_of_another_and_from_nothing_else(plain, quiet, tmp_path):
    new = plain.replace("train", init=plain.train.out, seed=7, out=str(tmp_path / "new"))
    trainer = open_run(new, quiet)
    old = deeploop.load(plain.train.out)
    assert trainer.done == 0 and not trainer.optimizer.state
    for a, b in zip(trainer.model.parameters(), old.parameters(), strict=True):
        assert torch.equal(a, b)
    trainer.fit()
    shutil.rmtree(plain.train.out)  # a run that has begun does not read it again
    found = checkpoint.find(str(tmp_path / "new"))
    assert found.config.train.init == plain.train.out
    assert open_run(found.config.replace("train", steps=5), quiet, found).done == 4


def test_adapters_may_start_fresh_and_no_other_weight(plain, quiet, tmp_path):
    new = plain.replace("train", init=plain.train.out, out=str(tmp_path / "new"))
    trainer = open_run(new.replace("model", lora_rank=2), quiet)
    old = deeploop.load(plain.train.out)
    x = torch.zeros(1, 4, dtype=torch.int64)
    assert torch.equal(trainer.model.eval()(x), old(x))
    for model, words in (
        ({"n_layers": 5}, ["lacks the weight sublayers.8."]),
        ({"n_layers": 3}, ["has, and the model has not, the weight sublayers.6."]),
        ({"d_model": 32}, ["the weight", "[256, 16]", "[256, 32]"]),
        ({"residual": "deeploop"}, ["lacks the weight sublayers.0.norm_out.weight"]),
    ):
        other = new.replace("model", **model).replace("train", out=str(tmp_path / "other"))
        refused(lambda other=other: open_run(other, quiet), "train.init=", *words, "config.json")
    absent = new.replace("train", init="nowhere", out=str(tmp_path / "other"))
    refused(lambda: open_run(absent, quiet), "train.init=", "nowhere", "no such folder")
    assert not (tmp_path / "other").exists()


def test_ranks_must_start_from_the_same_weights_and_have_the_same_teacher(plain, quiet, tmp_path):
    """A path may lead to other files on another machine."""
    corpus = open_run(plain.replace("train", out=str(tmp_path / "other"), seed=7), quiet).corpus
    facts = []
    for seed in (0, 7):
        folder = str(tmp_path / str(seed))
        open_run(plain.replace("train", out=folder, seed=seed), quiet).fit()
        config = checkpoint.find(folder).config.replace("train", init=folder, teacher=folder)
        facts.append(find_parents(config, corpus, started=False).facts())
    assert facts[0].keys() == {"the weights of train.init", "the weights of train.teacher"}
    assert all(facts[0][name] != facts[1][name] for name in facts[0])


def test_a_converted_run_has_its_parents_tokenizer(capsys, plain, quiet, tmp_path, corpus_file):
    bpe = tmp_path / "bpe"
    bpe.mkdir()
    train_bpe(bpe, corpus_file.read_text(), 280)
    config = plain.replace("data", tokenizer=f"gpt2:{bpe}")
    old, new = tmp_path / "with bpe", tmp_path / "new"
    open_run(config.replace("train", out=str(old)), quiet).fit()
    other = plain.replace("train", init=str(old), out=str(tmp_path / "other"))
    other = other.replace("model", vocab_size=deeploop.load(str(old)).config.vocab_size)
    refused(lambda: open_run(other, quiet), "train.init=", "its tokenizer is", "--data.tokenizer")
    shutil.rmtree(bpe)
    assert run(capsys, "convert", old, "--loops", 4, "--out", new)[0] == 0
    shutil.rmtree(old)
    code, said, _ = run(capsys, "generate", new, "--prompt", "quick", "--tokens", 4)
    assert code == 0 and said.startswith("quick")
