"""Configuration of a run: sections of fields, checked when they are made, saved as JSON.

Sections: `config.model`, `config.data`, `config.train`. Named configurations are in
`config.presets`, formulas of the residual scales in `config.scaling`. Importing this package
does not import torch.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated, Any

import tyro

from deeploop.config.data import DataConfig
from deeploop.config.depth import DEPTHS, ActConfig, MorConfig, SolverConfig
from deeploop.config.fields import MAY_CHANGE, build, check_fields, replace
from deeploop.config.model import MODELS, LoomConfig, ModelConfig, MoEConfig
from deeploop.config.reasoner import ReasonerConfig
from deeploop.config.renames import renamed_fields
from deeploop.config.train import LOSSES, TrainConfig
from deeploop.utils.errors import InputError
from deeploop.utils.foreign import brief

__all__ = [
    "ActConfig",
    "Config",
    "DataConfig",
    "LoomConfig",
    "MoEConfig",
    "ModelConfig",
    "MorConfig",
    "ReasonerConfig",
    "SolverConfig",
    "TrainConfig",
]


@dataclass(frozen=True)
class Config:
    """A whole run, as saved beside its checkpoints; raises InputError on impossible values."""

    preset: Annotated[tyro.conf.Suppress[str], MAY_CHANGE] = "deeploop-tiny"
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        m, t = self.model, self.train
        self._check_kind()
        drawn = t.loop_count != "fixed"
        if t.backprop == "last" and t.backprop_loops > m.loops and not drawn:
            raise InputError(
                f"train.backprop_loops={t.backprop_loops}: must not exceed model.loops={m.loops} "
                "with train.backprop=last"
            )
        depth = DEPTHS[m.depth]
        if t.backprop not in depth.backprops:
            raise InputError(
                f"model.depth={m.depth}: needs train.backprop={' or '.join(depth.backprops)}, and "
                f"it is {t.backprop}"
            )
        if t.loop_count_per == "sequence" and not depth.per_sequence:
            raise InputError(
                f"train.loop_count_per=sequence: model.depth={m.depth} ends each token by itself; "
                "give batch"
            )
        if LOSSES[t.loss].gate and not depth.gate:
            gates = " or ".join(name for name, choice in DEPTHS.items() if choice.gate)
            raise InputError(
                f"train.loss={t.loss}: needs exit probabilities; give --model.depth {gates}"
            )
        if t.teacher and (t.backprop not in ("full", "last") or t.loss != "last"):
            raise InputError(
                f"train.teacher={t.teacher!r}: is a target after the last loop alone; give "
                f"train.backprop full or last (it is {t.backprop}) and train.loss last ({t.loss})"
            )

    def _check_kind(self) -> None:
        """Refuse a kind of model without its data, and fields of training that it does not read."""
        m, choice = self.model, MODELS[self.model.kind]
        if choice.puzzles and not self.data.puzzles:
            raise InputError(
                f"model.reasoner.cycles_high={m.reasoner.cycles_high}: a reasoner needs puzzles; "
                "give data.puzzles, such as sudoku-4x4"
            )
        if self.data.puzzles and not choice.puzzles:
            raise InputError(
                f"data.puzzles={brief(repr(self.data.puzzles))}: only a reasoner reads puzzles; "
                "take a preset such as trm-sudoku-tiny, or give model.reasoner.cycles_high"
            )
        for name in ("init", "teacher", "eval_loops") if choice.puzzles else ():
            if value := getattr(self.train, name):
                raise InputError(f"train.{name}={value!r}: is read by language models alone")

    def replace(self, section: str, **values: Any) -> "Config":
        """Copy with fields of one section (model, model.moe, data, ...) replaced, checked again."""
        return replace(self, section.split("."), values)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Config":
        """Read what `to_json` wrote, in this version or an older one.

        Raises InputError on unknown fields and on a missing section.
        """
        try:
            values = json.loads(text)
            if not isinstance(values, dict):
                raise TypeError(f"a JSON object is needed, this is a {type(values).__name__}")
            values = renamed_fields(values)
            missing = [name for name in ("model", "data", "train") if name not in values]
            if missing:
                raise KeyError(missing[0])
            return build(cls, values)
        except (TypeError, KeyError, AttributeError, ValueError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            reason = f"no section {error}" if isinstance(error, KeyError) else brief(error)
            raise InputError(f"config: {reason}; was it written by another version?") from error
