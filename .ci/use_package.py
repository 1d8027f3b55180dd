"""Train two steps with the installed package, from a folder without its source.

python use_package.py FOLDER END: END is how the path of deeploop.kernels must end.
"""

import os
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

os.chdir(sys.argv[1])
sys.path.pop(0)  # the folder of this file

import deeploop.kernels  # noqa: E402
from deeploop.cli import main  # noqa: E402

place = Path(deeploop.kernels.__file__).parent
assert str(place).endswith(sys.argv[2]), f"deeploop.kernels is {place}"
assert files("deeploop").joinpath("py.typed").is_file()
with tempfile.TemporaryDirectory() as out:
    command = ["train", "--steps", "2", "--train.eval-tokens", "4096", "--out", f"{out}/run"]
    assert main(command) == 0
