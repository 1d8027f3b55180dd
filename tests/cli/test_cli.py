"""The command line as a user meets it: exit codes, one sentence, nothing written over."""

import io
import json
import os
import re
import subprocess
import sys

import pytest

from deeploop.cli import VERBS, main
from deeploop.cli.train import parse_train
from deeploop.config import Config, DataConfig, ModelConfig, MoEConfig, TrainConfig
from deeploop.utils.errors import InputError
from tests.helpers.limits import file_size_limit

TINY = [
    "--model.d-model", "16", "--model.n-heads", "2", "--model.loops", "2", "--model.seq-len", "16",
    "--train.batch-size", "4", "--steps", "4", "--train.eval-tokens", "64",
]  # fmt: skip


def run(capsys, *arguments):
    code = main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_train_resume_generate(capsys, tmp_path, corpus_file, pictures):
    out = str(tmp_path / "run")
    code, said, _ = run(capsys, "train", "--data", str(corpus_file), "--out", out, *TINY)
    assert code == 0
    for word in ("parameters", "alpha", "unigram", "bigram", "tokens/s", "bits/byte", "sample"):
        assert word in said
    assert all((tmp_path / "run" / f"{x}.png").stat().st_size > 1000 for x in ("loss", "loops"))
    code, said, _ = run(capsys, "train", "--resume", out, "--steps", "6")
    assert code == 0 and "step      6/6" in said
    assert re.search(r"took     [\d.]+ s, .*GiB peak", said)
    code, said, notes = run(capsys, "generate", out, "--prompt", "the quick", "--tokens", "8")
    assert code == 0 and said.startswith("the quick")
    assert re.fullmatch(r"took     [\d.]+ s, up to 8 tokens a sample\n", notes)
    again = ["--prompt", "the quick brown fox", "--tokens", "8", "--num-samples", "2"]
    code, said, notes = run(capsys, "generate", out, *again)
    assert said.startswith("--- sample 1 of 2 ---\nthe quick brown")
    assert said.count("--- sample") == said.count("the quick brown fox") == 2
    assert notes.startswith("prompt   19 tokens, of which the model reads the last 16")
    code, _, said = run(capsys, "generate", out, "--prompt", "a", "--device", "tpu")
    assert code == 2 and "device='tpu'" in said and "train." not in said
    code, said, _ = run(capsys, "plan", out)
    assert code == 0 and "4 x 16, micro-batches of 4" in said


def test_resume_takes_the_runs_own_configuration(capsys, tmp_path, corpus_file):
    out = str(tmp_path / "run")
    run(capsys, "train", "--data", str(corpus_file), "--out", out, *TINY)
    parsed = parse_train(["--resume", out, "--lr", "1e-4"])
    assert parsed.config.model.d_model == 16 and parsed.config.train.lr == 1e-4
    assert parse_train([f"--resume={out}"]).config == parse_train(["--resume", out]).config


def test_print_config_prints_what_would_run(capsys):
    code, said, _ = run(
        capsys, "train", "gpt2-small-r3-deeploop", "--model.loops", "5", "--print-config"
    )
    printed = json.loads(said)
    assert code == 0 and printed["model"]["loops"] == 5 and printed["model"]["d_model"] == 768


def test_short_options_set_the_models_loops_and_the_backprop():
    short = ["--loops", "8", "--backprop", "last", "--batch-size", "3"]
    config = parse_train(short).config
    assert (config.model.loops, config.train.backprop) == (8, "last")
    full = ["--model.loops", "8", "--train.backprop", "last", "--train.batch-size", "3"]
    assert config == parse_train(full).config


def test_print_config_reads_back(capsys):
    _, said, _ = run(capsys, "train", "--print-config")
    assert Config.from_json(said) == parse_train([]).config


@pytest.mark.parametrize("verb", ["train", "plan", "profile", "diagnose"])
def test_a_configuration_is_fed_back_and_options_override_it(verb, capsys, tmp_path, monkeypatch):
    _, said, _ = run(capsys, "train", "loom-tiny", *TINY, "--print-config")
    values = json.loads(said)
    values["model"]["arm"] = values["model"].pop("residual")  # as older versions wrote
    file = tmp_path / "config.json"
    file.write_text(json.dumps(values))
    code, said, _ = run(capsys, "train", "--config", str(file), "--lr", "0.5", "--print-config")
    expected = parse_train(["loom-tiny", *TINY, "--lr", "0.5"]).config
    assert code == 0 and Config.from_json(said) == expected
    more = [] if verb == "plan" else ["--out", str(tmp_path / "out")]
    more += ["--probes", "1", "--sequences", "2"] if verb == "diagnose" else []
    if verb != "train":
        assert run(capsys, verb, f"--config={file}", *more, "--model.loops", "1")[0] == 0
    code, _, said = run(capsys, verb, "loom-tiny", "--config", str(file))
    assert code == 2 and "give one of the two" in said
    for text in ("", "{}", "[" * 10**5, '{"model": 1, "data": {}, "train": {}}'):
        file.write_text(text)
        code, _, said = run(capsys, verb, "--config", str(file))
        assert code == 2 and str(file) in said and said.count("\n") == 1


def test_resume_of_a_run_without_a_checkpoint_takes_its_configuration(capsys, tmp_path):
    (tmp_path / "config.json").write_text(parse_train(["--model.loops", "3"]).config.to_json())
    assert parse_train(["--resume", str(tmp_path)]).config.model.loops == 3


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_names_every_verb(capsys, arguments):
    code, said, _ = run(capsys, *arguments)
    assert code == 0 and all(f"deeploop {verb} " in said for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(verb, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([verb, "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert "--" in said and ("deeploop-tiny" in said or verb != "train")
    assert ("--model.loops" in said) == ("--backprop" in said) == (verb in WITH_CONFIG)


WITH_CONFIG = ("train", "profile", "diagnose", "plan")
BAD = {
    "missing file": (["--data", "nowhere.txt"], "nowhere.txt"),
    "empty file": (["--data", "empty.txt"], "empty.txt"),
    "short file": (["--data", "short.txt"], "short.txt"),
    "torn shard": (["--data", "torn.bin"], "torn.bin"),
    "token id >= vocab": (["--data", "high", "--model.vocab-size", "300"], "60000"),
    "no loops": (["--model.loops", "0"], "model.loops=0"),
    "unknown residual rule": (["--model.residual", "x"], "model.residual='x'"),
    "uneven heads": (["--model.n-heads", "5"], "model.n_heads=5"),
    "unknown preset": (["deeplop-tiny"], "deeplop-tiny"),
    "absent run": (["--resume", "nothing"], "nothing"),
    "empty run": (["--resume", ""], "''"),
    "run of nobody": (["--resume", "~nobody-here/x"], "~nobody-here"),
    "long name": (["--data", "x" * 5000], "xxx..."),
    "long tokenizer": (["--data.tokenizer", "x" * 5000], "xxx..."),
    "NUL in a folder's name": (["--out", "a\0b"], "'a\\x00b'"),
    "device for a file": (["--data", "/dev/null"], "/dev/null"),
    "folder for a file": (["--data", "folder.txt"], "folder.txt"),
    "deep jsonl": (["--data", "deep.jsonl"], "deep.jsonl line 1"),
    "newline in a key": (["--data", "newline.jsonl"], "a\\nb"),
    "many keys": (["--data", "keys.jsonl"], "..."),
    "meta of wrong types": (["--data", "meta"], "meta.json"),
    "huge vocabulary": (["--model.vocab-size", str(2**40)], str(2**40)),
    "huge width": (["--model.d-model", str(2**30), "--model.n-heads", "2"], "model.d_model="),
    "a million loops": (["--model.loops", "1000000"], "model.loops=1000000"),
    "two billion layers": (["--model.n-layers", str(2**31 - 1)], f"model.n_layers={2**31 - 1}"),
    "huge batch": (["--train.batch-size", "2000000"], "train.batch_size=2000000"),
    "long sequences": (["--model.seq-len", str(2**31 - 1)], f"model.seq_len={2**31 - 1}"),
    "huge seed": (["--seed", str(2**64)], "train.seed"),
    "small vocabulary": (["--model.vocab-size", "10"], "10"),
    "no such device": (["--train.device", "tpu"], "tpu"),
    "no such tokenizer": (["--data.tokenizer", "nope"], "nope"),
    "existing folder": (["--out", "full"], "full"),
    "file in the way": (["--out", "short.txt"], "short.txt"),
    "unwritable folder": (["--out", "/proc/nothing/run"], "/proc/nothing/run"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_in_one_sentence_and_code_2(case, capsys, tmp_path, monkeypatch):
    import numpy as np

    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "torn.bin").write_bytes(b"\x58\xcf\x34\x01" + b"\0" * 100)
    (tmp_path / "high").mkdir()
    for part in ("train", "val"):
        np.full(1000, 60000, "<u2").tofile(tmp_path / "high" / f"{part}.bin")
    (tmp_path / "folder.txt" / "sub.txt").mkdir(parents=True)
    (tmp_path / "deep.jsonl").write_text('{"text": ' + "[" * 10**5 + "]" * 10**5 + "}\n")
    (tmp_path / "newline.jsonl").write_text('{"a\\nb": 1}\n')
    (tmp_path / "keys.jsonl").write_text(json.dumps({f"k{i}": 1 for i in range(999)}) + "\n")
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "meta.json").write_text('{"shards": ["train.bin"], "vocab_size": 1e999}')
    np.zeros(1000, "<u2").tofile(tmp_path / "meta" / "train.bin")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("precious")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    flags, named = BAD[case]
    code, _, said = run(capsys, "train", *flags)
    assert code == 2
    assert named in said and said.count("\n") == 1 and said.startswith("deeploop train: ")
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert after == before and not (tmp_path / "runs").exists()


def test_checkpoint_of_another_config(capsys, tmp_path, corpus_file):
    out = str(tmp_path / "run")
    run(capsys, "train", "--data", str(corpus_file), "--out", out, *TINY)
    code, _, said = run(capsys, "train", "--resume", out, "--model.loops", "3")
    assert code == 2 and "model.loops=3: the checkpoint" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        ["--model.width", "3"],
        ["--model.loops", "four"],
        ["--nope"],
        ["--steps"],
        ["--resume"],
    ],
)
def test_unknown_keys_and_wrong_types_are_refused(flags, capsys):
    code, _, said = run(capsys, "train", *flags)
    assert code == 2 and flags[0] in said
    sentence, *similar = said.splitlines()
    assert "; see --help" in sentence and "---" not in said
    assert sentence.endswith("perhaps you meant" if similar else "see --help")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trian"], "trian: no such verb; did you mean deeploop train?"),
        (["loom-tiny"], "did you mean deeploop train loom-tiny?"),
        (["zzz"], "use train, generate"),
        (["train", "--steps", "5", "loom-tiny"], "put loom-tiny first"),
        (["train", "--steps", "5", "loom-tinny"], "put loom-tiny first"),
        (["train", "loom-tinny"], "did you mean loom-tiny"),
        (["plan", "loom-tinny"], "did you mean loom-tiny?"),
        (["plan", "--train.device", "cpu"], "a plan takes --device"),
        (["diagnose", "--batch-size", "4"], "a diagnosis takes --sequences"),
    ],
)
def test_what_is_mistyped_or_misplaced_is_named(arguments, named, capsys):
    code, _, said = run(capsys, *arguments)
    assert code == 2 and named in said and said.count("\n") == 1


def test_similar_options_are_listed_one_a_line_with_their_help(capsys):
    code, _, said = run(capsys, "train", "--train.micro", "3")
    sentence, *similar = said.splitlines()
    assert code == 2 and "--train.micro" in sentence
    assert [line.split()[0] for line in similar] == ["--micro-batch,", "--train.min-lr"]
    assert similar[0].startswith("  ") and "sequences per forward" in similar[0]


def test_an_options_value_may_be_a_presets_name(capsys):
    """It is the option that is wrong."""
    _, _, said = run(capsys, "train", "--no-such-option", "loom-tiny")
    assert "--no-such-option" in said and "first" not in said


def test_a_refused_preparation_leaves_nothing(capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"body": "x"}\n')
    out = tmp_path / "shards"
    code, _, said = run(
        capsys, "data", str(tmp_path / "bad.jsonl"), str(out), "--tokenizer", "byte"
    )
    assert code == 2 and said.count("\n") == 1 and not out.exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--prompt", "FILE:a\0b"], "a\\x00b"),
        (["--prompt", "a", "--seed", str(2**70)], "seed"),
        (["--prompt", "a", "--loops", str(2**70)], "loops"),
        (["--prompt", "a", "--temperature", "nan"], "temperature=nan"),
    ],
)
def test_bad_generation_ends_in_one_sentence(flags, named, capsys, tmp_path):
    code, _, said = run(capsys, "generate", str(tmp_path), *flags)
    assert code == 2 and named in said and said.count("\n") == 1


def test_output_that_cannot_be_shown(tmp_path, corpus_file, monkeypatch):
    """An ASCII terminal replaces what it lacks, such as the sample's bytes past 127."""
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    corpus_file.write_text("h\u00e9 \u20ac " * 2000)
    assert main(["train", "--data", str(corpus_file), "--out", str(tmp_path / "a"), *TINY]) == 0
    terminal.flush()
    assert b"?" in terminal.buffer.getvalue()


def test_output_that_cannot_be_written():
    """A full disk behind stdout is a sentence."""
    command = [sys.executable, "-m", "deeploop.cli", "train", *TINY, "--print-config"]
    with open("/dev/full", "w") as full:
        lost = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert lost.returncode == 2 and lost.stderr.count("\n") == 1


def test_full_disk(capsys, tmp_path, corpus_file):
    """A limit on file size stands in for the disk: the checkpoint is what does not fit."""
    out = str(tmp_path / "run")
    with file_size_limit(9000):
        code, _, said = run(capsys, "train", "--data", str(corpus_file), "--out", out, *TINY)
    assert code == 2 and said.count("\n") == 1 and "step_000004" in said
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_prepared_shards_train(capsys, tmp_path, corpus_file):
    shards = str(tmp_path / "shards")
    code, said, _ = run(
        capsys, "data", str(corpus_file), shards, "--tokenizer", "byte", "--val-fraction", "0.1"
    )
    assert code == 0 and shards in said
    out = str(tmp_path / "run")
    code, said, _ = run(capsys, "train", "--data", shards, "--out", out, *TINY)
    assert code == 0 and "bits/byte" in said
    code, _, said = run(capsys, "data", str(corpus_file), shards, "--tokenizer", "byte")
    assert code == 2 and said.count("\n") == 1


def test_missing_preset_error_is_an_input_error():
    with pytest.raises(InputError):
        parse_train(["nothing-like-it"])


@pytest.mark.parametrize(
    ("old", "new"),
    [("--model.arm", "--model.residual"), ("--train.plan-loops", "--train.backprop-loops")],
)
def test_a_flag_of_an_older_version_names_todays(old, new, capsys):
    assert main(["train", old, "2"]) == 2
    assert f"{old}: is now {new}" in capsys.readouterr().err


def test_a_profile_is_silent_on_standard_error(tmp_path):
    """torch's profiler writes to the process's standard error, past Python."""
    command = [sys.executable, "-m", "deeploop.cli", "profile", *TINY, "--out", tmp_path / "p"]
    command += ["--steps", "1", "--warmup", "1"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"\ntook     [\d.]+ s\n", done.stdout)


@pytest.mark.parametrize(
    ("section", "option", "values"),
    [
        (ModelConfig, "--model", {"n_heads": 5}),
        (ModelConfig, "--model", {"residual": "zzz" * 40}),  # longer than a line of tyro's box
        (MoEConfig, "--model.moe", {"experts": 4, "top_k": 5}),
        (TrainConfig, "--train", {"warmup": 0.95}),
        (DataConfig, "--data", {"val_fraction": 1.0}),
    ],
)
def test_options_are_refused_as_a_section_made_in_python_is(section, option, values, capsys):
    with pytest.raises(InputError) as refused:
        section(**values)
    flags = [w for k, v in values.items() for w in (f"{option}.{k.replace('_', '-')}", str(v))]
    code, _, said = run(capsys, "train", *flags)
    assert code == 2 and said == f"deeploop train: {refused.value}\n"


def test_options_are_checked_together():
    """A value that fits the other options alone is refused beside the preset's."""
    options = ["--model.d-model", "64", "--model.n-heads", "8", "--model.moe.experts", "4"]
    model = parse_train([*options, "--model.moe.top-k", "2"]).config.model
    assert (model.d_model, model.n_heads, model.moe.experts, model.moe.top_k) == (64, 8, 4, 2)
