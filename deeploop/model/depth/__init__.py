"""Depth rules: which tokens take part in a loop. One file for each choice."""

import importlib

from deeploop.config import ModelConfig
from deeploop.config.depth import DEPTHS
from deeploop.model.depth.base import Depth

__all__ = ["Depth", "depth_rule"]


def depth_rule(config: ModelConfig) -> Depth:
    """Make the rule that `config.depth` names (`deeploop.config.depth.DEPTHS`)."""
    module, _, name = DEPTHS[config.depth].rule.partition(":")
    return getattr(importlib.import_module(module), name)(config)
