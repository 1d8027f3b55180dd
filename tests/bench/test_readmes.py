"""The commands in the bench's READMEs."""

import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READMES = [ROOT / "bench" / "README.md", ROOT / "bench" / "results" / "README.md"]
CHEAP = r"bench/results/\S+\.json"  # run here; the others say what they need


def commands() -> list[str]:
    blocks = [re.findall(r"```bash\n(.*?)```", path.read_text(), re.S) for path in READMES]
    return [line for found in blocks for block in found for line in block.splitlines()]


@pytest.mark.parametrize("line", commands())
def test_a_command_runs_or_says_what_it_needs(line, capsys, monkeypatch):
    words = shlex.split(line, comments=True)
    for module in (words[i + 1] for i, word in enumerate(words) if word == "-m"):
        assert find_spec(module), module
    for word in words:
        if re.match(r"(bench|tests)(/|$)", word):
            assert (ROOT / word).exists(), word
    if not re.search(CHEAP, line):
        assert "#" in line, f"{line}: a comment must say what it does or needs"
        return
    assert words[:2] == ["python", "-m"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", words[2:])
    try:
        runpy.run_module(words[2], run_name="__main__")
    except SystemExit as stopped:
        assert not stopped.code, stopped.code
    assert capsys.readouterr().out
