"""Train, profile and study looped Transformers on fused kernels.

    import deeploop

    model = deeploop.load("runs/my-run")                  # LoopLM of a run or checkpoint
    texts = deeploop.generate("runs/my-run", "Once upon", loops=6)
    config = deeploop.preset("gpt2-small-r3-deeploop")    # Config
    model = deeploop.LoopLM(config.model)

Names are imported when they are first used, so `import deeploop` alone loads nothing.
`deeploop.Trainer` runs training as `deeploop train` does; `deeploop/README.md` has a training
loop of your own in ten lines.
"""

import os
import sys
from importlib import import_module
from importlib.util import spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from deeploop.config import Config
    from deeploop.config.presets import preset
    from deeploop.eval.generate import generate, load
    from deeploop.model.looplm import LoopLM
    from deeploop.train.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["Config", "LoopLM", "Trainer", "generate", "load", "preset"]

_MODULES = {
    "Config": "deeploop.config",
    "LoopLM": "deeploop.model.looplm",
    "Trainer": "deeploop.train.trainer",
    "generate": "deeploop.eval.generate",
    "load": "deeploop.eval.generate",
    "preset": "deeploop.config.presets",
}

_PACKAGE = os.path.dirname(os.path.abspath(__file__))


class _KernelsBesidePackage:
    """Import deeploop.kernels from a checkout, where the folder kernels/ is beside deeploop/."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Return where deeploop.kernels is; None for any other name."""
        if name != "deeploop.kernels":
            return None
        folder = os.path.join(os.path.dirname(_PACKAGE), "kernels")
        source = os.path.join(folder, "__init__.py")
        return spec_from_file_location(name, source, submodule_search_locations=[folder])


# An installed package has kernels/ inside, as setup.py says. A checkout's root cannot be added
# to __path__: tests and bench would become deeploop.tests and deeploop.bench. The finder comes
# first, because that of another, editable install would answer with its kernels.
if not os.path.isdir(os.path.join(_PACKAGE, "kernels")):
    sys.meta_path.insert(0, _KernelsBesidePackage)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'deeploop' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
