"""Every command and example in a README works, or is marked with what it needs."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import deeploop
from deeploop.cli import main

pytestmark = pytest.mark.usefixtures("no_pictures")

ROOT = Path(deeploop.__file__).parents[1]
READMES = sorted(ROOT.rglob("README.md"))
READMES = [p for p in READMES if not any(x.startswith(".") for x in p.relative_to(ROOT).parts)]
# What a machine without GPU, network or hours to spare cannot run, as the READMEs mark it.
NEEDS = re.compile(r"needs|on a GPU|hour|minutes|torchrun --nproc-per-node 8|pip install")
# Other folders have tests of their commands: bench/README.md and bench/results/README.md.
SHORT = [
    "--steps", "2", "--train.eval-tokens", "512", "--train.batch-size", "4",
    "--model.seq-len", "32",
]  # fmt: skip


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
        assert main(["train", *SHORT, "--out", "runs/RUN"]) == 0
        for name in ("a", "x"):
            shutil.copytree("runs/RUN", f"runs/{name}")
        plain = ["--model.residual", "pre_norm", "--model.n-layers", "4", "--loops", "1"]
        assert main(["train", *SHORT, *plain, "--out", "runs/plain"]) == 0
        looped = ["--loops", "2", "--rank", "8", "--out", "runs/looped"]
        assert main(["convert", "runs/plain", *looped]) == 0
    assert Path.cwd() == cwd
    return folder


def shortened(words):
    """A command with fewer steps and into a folder of its own, where it would take minutes."""
    if words[0] == "train" and "--print-config" not in words:
        if "--steps" in words:  # a tenth of those that the README says, 2 to 6
            at = words.index("--steps") + 1
            words[at] = str(max(2, min(6, int(words[at]) // 10)))
        if "--out" in words:
            shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
        if "--resume" in words:
            return [*words, "--train.eval-tokens", "512"]
        words += [w for pair in zip(SHORT[::2], SHORT[1::2], strict=True)
                  if pair[0] not in words for w in pair]  # fmt: skip
    if words[0] == "convert":
        shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
    if words[0] == "profile":
        words += ["--train.batch-size", "2"]
    if words[0] == "generate":
        words += ["--tokens", "8"] if "--tokens" not in words else []
    if words[0] == "diagnose":
        words += ["--sequences", "2"] if "--sequences" not in words else []
    return words


@pytest.mark.parametrize("line", list(commands()))
def test_command(line, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    line = line.split("  #")[0].strip()
    for words in (shlex.split(part, comments=True) for part in line.split("&&")):
        if words[0] == "deeploop":
            words = [re.sub(r"step_\d+", "step_000002", w) for w in words]
            words = ["corpus.txt" if w == "corpus.jsonl" and "gpt2" in line else w for w in words]
            assert main(shortened(words[1:])) == 0, line
        elif words[0] == "pytest":
            targets = [w for w in words[1:] if not w.startswith("-") and "=" not in w]
            assert all((ROOT / t).exists() for t in targets)
        elif words[:2] == ["python", "-m"]:
            script = f"import importlib.util as u; assert u.find_spec({words[2]!r})"
            subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
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
        exec(compile(code, str(path), "exec"), {"__name__": "example"})
