"""Configurations by name: a file for each paper, and the default that trains on a CPU."""

import difflib
import functools
from collections.abc import Mapping
from types import MappingProxyType

from deeploop.config import Config
from deeploop.config.presets.fixed_point import fixed_point_presets
from deeploop.config.presets.gpt2 import gpt2_presets
from deeploop.config.presets.huginn import huginn_presets
from deeploop.config.presets.loom import LOOM_ABLATIONS, loom_presets
from deeploop.config.presets.mor import mor_presets
from deeploop.config.presets.ouro import ouro_presets
from deeploop.config.presets.reasoner import reasoner_presets
from deeploop.config.presets.relaxed import relaxed_presets
from deeploop.config.presets.tasks import task_presets
from deeploop.config.presets.universal import universal_presets
from deeploop.utils.errors import InputError

SUMMARY = (
    "deeploop-tiny, gpt2-{small,medium}-r{1,3,5,7}-{baseline,deeploop}, "
    "deq-tiny, huginn-{tiny,3.5b}, mor-{tiny,360m}, ouro-{tiny,1.4b}, parcae-{tiny,140m}, "
    "reach-tiny, rrt-tiny, ut-tiny, {hrm,trm}-{sudoku,maze,arc}, {hrm,trm}-sudoku-tiny, "
    "trm-maze-tiny, hrm-arc-deeploop[-counted], "
    "loom-{tiny,100m,329m,1.7b,700m-isoflop-h1..6}, each loom also with "
    "-released or an ablation: " + ", ".join(f"-{name}" for name in LOOM_ABLATIONS)
)

PAPERS = {  # by a name's beginning
    "deq-": "DEQ, 1909.01377",
    "gpt2-": "DeepLoop, 2607.13491",
    "hrm-": "HRM, 2506.21734",
    "huginn-": "Huginn, 2502.05171",
    "loom-": "LOOM, 2610.01153",
    "mor-": "Mixture-of-Recursions, 2507.10524",
    "ouro-": "Ouro, 2510.25741",
    "parcae-": "Parcae",
    "reach-": "reachability by hops, a generated task",
    "rrt-": "Relaxed Recursive, 2410.20672",
    "trm-": "TRM, 2510.04871",
    "ut-": "Universal Transformer, 1807.03819",
}


@functools.cache
def presets() -> Mapping[str, Config]:
    """Return every named configuration by its name."""
    by_paper = (
        fixed_point_presets, gpt2_presets, huginn_presets, loom_presets, mor_presets,
        ouro_presets, reasoner_presets, relaxed_presets, task_presets, universal_presets,
    )  # fmt: skip
    named = [Config(preset="deeploop-tiny"), *(config for paper in by_paper for config in paper())]
    return MappingProxyType({config.preset: config for config in named})


def preset(name: str) -> Config:
    """Return a named configuration; raises InputError with the nearest names."""
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        others = f"did you mean {', '.join(near)}?" if near else f"there are {SUMMARY}"
        raise InputError(f"preset {name!r}: unknown; {others}")
    return known[name]
