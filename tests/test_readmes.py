"""Every command and example in a README works, or is marked with what it needs."""

import itertools
import re
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

import deeploop
from deeploop.cli import main

ROOT = Path(deeploop.__file__).parents[1]
READMES = sorted(ROOT.rglob("README.md"))
READMES = [p for p in READMES if not any(x.startswith(".") for x in p.relative_to(ROOT).parts)]
# What a machine without GPU, network or hours to spare cannot run, as the READMEs mark it.
NEEDS = re.compile(r"needs|on a GPU|hour|minutes|torchrun --nproc-per-node 8|pip install")
# Other folders have tests of their commands: bench/README.md and bench/results/README.md.
SHORT = {"--steps": 2, "--train.eval-tokens": 512, "--train.batch-size": 4, "--model.seq-len": 32}
# By verb, options of a command that does not give them, so that it takes about a second.
ADDED = {
    "train": SHORT,
    "profile": {"--warmup": 1, "--train.batch-size": 2, "--model.seq-len": 32},
    "plan": {"--loops": 1},
    "eval": {"--tokens": 256},
    "generate": {"--tokens": 8},
    "diagnose": {"--sequences": 2},
}
LESS = {  # in the place of those that a command gives
    "--steps": lambda steps: max(2, min(6, steps // 10)),
    "--loops": lambda loops: min(3, loops),
    "--tokens": lambda tokens: min(256, tokens),
}
EXAMPLES = {"steps": 2, "eval_tokens": 512}  # of an example in Python


def blocks(path, language):
    text = path.read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def commands():
    for path in READMES:
        name = str(path.relative_to(ROOT))
        if name.startswith(("bench", "tests")):
            continue
        for block in blocks(path, "bash"):
            for line in block.splitlines():
                if line.strip() and not NEEDS.search(line):
                    yield pytest.param(line, id=f"{name}: {line[:60]}")


def python_blocks():
    for path in READMES:
        name = str(path.relative_to(ROOT))
        if name.startswith(("bench", "tests")):
            continue
        for i, code in enumerate(blocks(path, "python")):
            yield pytest.param(path, code, id=f"{name}-{i}")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with what the commands name: texts, shards and runs."""
    folder = tmp_path_factory.mktemp("readme")
    text = "".join(f"line {i % 7}: the quick brown fox\n" for i in range(2000))
    (folder / "corpus.txt").write_text(text)
    (folder / "corpus.jsonl").write_text('{"text": "the quick brown fox jumps"}\n' * 500)
    cwd = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["data", "corpus.txt", "shards", "--tokenizer", "byte"]) == 0
        short = list(itertools.chain(*((name, str(x)) for name, x in SHORT.items())))
        assert main(["train", *short, "--out", "runs/RUN"]) == 0
        for name in ("a", "x"):
            shutil.copytree("runs/RUN", f"runs/{name}")
        plain = ["--model.residual", "pre_norm", "--model.n-layers", "4", "--loops", "1"]
        assert main(["train", *short, *plain, "--out", "runs/plain"]) == 0
        looped = ["--loops", "2", "--rank", "8", "--out", "runs/looped"]
        assert main(["convert", "runs/plain", *looped]) == 0
    assert Path.cwd() == cwd
    return folder


def shortened(words):
    """A command with fewer steps and loops, where it would take minutes."""
    pairs = itertools.pairwise(["", *words])  # eval's --loops is a list, and short as it is
    words = [str(LESS[a](int(b))) if a in LESS and b.isdigit() else b for a, b in pairs]
    if "--print-config" in words:
        return words
    if "--resume" in words:
        return [*words, "--train.eval-tokens", "512"]
    for name, value in ADDED.get(words[0], {}).items():
        words += [name, str(value)] if name not in words else []
    return words


@pytest.mark.parametrize("line", list(commands()))
def test_command(line, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    line = line.split("  #")[0].strip()
    for words in (shlex.split(part, comments=True) for part in line.split("&&")):
        if words[0] == "deeploop":
            words = [re.sub(r"step_\d+", "step_000002", w) for w in words]
            words = ["corpus.txt" if w == "corpus.jsonl" and "gpt2" in line else w for w in words]
            if words[1] in ("train", "convert") and "--out" in words:
                shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
            assert main(shortened(words[1:])) == 0, line
        elif words[0] == "pytest":
            targets = [w for w in words[1:] if not w.startswith("-") and "=" not in w]
            assert all((ROOT / t).exists() for t in targets)
        elif words[:2] == ["python", "-m"]:
            assert find_spec(words[2]), line
        elif words[0] == "torchrun":
            assert words[words.index("-m") + 1] == "deeploop.cli"
        elif words[0].startswith("bench/"):
            assert (ROOT / words[0]).exists()
        else:
            raise AssertionError(f"no test knows how to run: {line}")


@pytest.mark.parametrize(("path", "code"), list(python_blocks()))
def test_python_example(path, code, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    if code.startswith("    "):  # one line of a file that the text names
        compile("{" + code.strip() + "}", str(path), "eval")
    else:
        code = re.sub(r"(steps|eval_tokens)=\d+", lambda m: f"{m[1]}={EXAMPLES[m[1]]}", code)
        exec(compile(code, str(path), "exec"), {"__name__": "example"})
