"""The script for a shell completes verbs and their options."""

import shutil
import subprocess

import pytest

from deeploop.cli import VERBS, main
from deeploop.cli.completion import OPTIONS


def script(capsys, shell):
    with pytest.raises(SystemExit) as stopped:
        main(["completion", shell])
    assert not stopped.value.code
    return capsys.readouterr().out


def test_every_verb_has_options_to_complete():
    assert tuple(OPTIONS) == VERBS


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell, capsys):
    said = script(capsys, shell)
    assert "deeploop" in said and "batch-size" in said


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(capsys, tmp_path):
    (tmp_path / "script").write_text(
        "deeploop() { :; }\n" + script(capsys, "bash") + "f=_tyro_deeploop\n"
        "COMP_WORDS=(deeploop tra); COMP_CWORD=1; $f deeploop tra deeploop; echo ${COMPREPLY[@]}\n"
        "COMP_WORDS=(deeploop plan --model.lo); COMP_CWORD=2; $f deeploop --model.lo plan\n"
        "echo ${COMPREPLY[@]}\n"
    )
    done = subprocess.run(["bash", tmp_path / "script"], capture_output=True, text=True)
    verb, options = done.stdout.splitlines()
    assert verb == "train" and options.split()[0] == "--model.loops", done.stderr
