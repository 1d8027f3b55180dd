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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'deeploop' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
