"""Runs the tests of the byte counter and of the tuner's settings under Triton's interpreter."""

import json
from pathlib import Path

import pytest

from bench.kernels import traffic
from tests.helpers.interpreted import run_interpreted

pytest.importorskip("triton", reason="Triton is not installed")
ROOT = Path(__file__).parents[3]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_under_the_interpreter(file, tmp_path):
    code, output = run_interpreted([str(file)], tmp_path)
    if code != 0:
        pytest.fail(f"exit code {code}:\n{output}", pytrace=False)


def test_the_command_starts_the_interpreter_itself(capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    options = "--json --only ours --rows 3 --d 16 --op inject --dtype bf16"
    assert traffic.main(options.split()) == 0
    forward, _ = json.loads(capfd.readouterr().out)
    assert forward["counted"]["ours"]["kernels"], "no Triton kernel ran"
