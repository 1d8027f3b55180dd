"""Use the installed package from a folder without its source.

python use_package.py FOLDER END [train options]: END is how the path of deeploop.kernels must end.
"""

import os
import sys
from importlib.resources import files
from pathlib import Path

folder, end, *options = sys.argv[1:]
os.chdir(folder)
sys.path.pop(0)  # the folder of this file

import torch  # noqa: E402

from deeploop.cli import main  # noqa: E402
from deeploop.kernels import pre_norm, registry  # noqa: E402

place = Path(registry.__file__).parent
assert str(place).endswith(end), f"deeploop.kernels is {place}"
assert files("deeploop").joinpath("py.typed").is_file()
x = torch.randn(2, 4)
assert pre_norm(x, x, None)[0].equal(x + x)
assert not options or main(["train", *options]) == 0
