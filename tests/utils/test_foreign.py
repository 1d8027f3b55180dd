"""Files that others wrote are read, or refused in one sentence."""

import os

import pytest

from deeploop.utils.errors import InputError
from deeploop.utils.foreign import foreign, open_regular, read_json
from tests.helpers.data import refused


@pytest.mark.parametrize("kind", ["a named pipe", "a device", "a folder", "No such file"])
def test_only_regular_files_are_read_and_nothing_waits(tmp_path, kind):
    path = tmp_path / "x.json"
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    elif kind == "a folder":
        path.mkdir()
    refused(lambda: open_regular(path, "tokenizer 'x.json'"), "tokenizer 'x.json'", kind)
    refused(lambda: read_json(path), path, kind)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not readable"),
        ("[1]", "not a JSON object"),
        ('{"a": ' * 10**5, "nested too deeply"),
        ('{"step": 1' + "0" * 10**4 + "}", "not readable"),
        ("{}", "no 'step'"),
        ('{"step": true}', "step is True, not of type int"),
        ('{"step": 1, "loss": "x"}', "loss is x, not of type float or int"),
        ('{"step": "' + "x" * 10**6 + '"}', "step is xxx"),
        (" " * 2**24 + "{}", "larger than 16,777,216 bytes"),
    ],
)
def test_damaged_json_is_one_short_sentence(tmp_path, text, reason):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_json(path, types={"step": int, "loss?": float})
    assert reason in str(caught.value) and len(str(caught.value)) < len(str(path)) + 300


def test_json_of_the_right_types_is_read(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"step": 3, "name": null, "rate": 1}')
    types = {"step": int, "name": (str, type(None)), "rate": float, "absent?": dict}
    assert read_json(path, types=types) == {"step": 3, "name": None, "rate": 1}


def test_a_rust_panic_is_refused_and_an_interrupt_passes():
    class PanicException(BaseException):
        pass

    def fail(error):
        with foreign("tokenizer 'x'"):
            raise error

    refused(lambda: fail(PanicException("index out of bounds")), "tokenizer 'x'", "out of bounds")
    refused(lambda: fail(AttributeError("x\ny")), "(y)")
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
